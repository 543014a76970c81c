"""The contract between the tables: what must hold after every transition, and what is degraded though it holds.

An instance is valid if three conditions hold:

    peers      at least one ready worker has the attention role; routes lead only to ready workers with the expert role
               (where no ready worker holds the expert, to one that is leaving); all tables are of one epoch
    coverage   every expert of every layer has a place that really holds it, and no place is listed twice; a masked
               expert needs none, because no token is sent to it
    epochs     every attention worker uses the routes of the published epoch

The first two depend on the published tables alone: together they are the *violations*, and streams may have to wait
while there are any. The third is reached one step after a change: a worker that still uses older routes is served all
the same, because a request names its expert; but no slot that its routes may name is given to another expert.

All functions return sentences for operators; an empty result means that all is well. An instance whose workers have
both roles has no expert workers: its placement and routes are None.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from everserve.tables.ids import NO_RANK, Epoch, Rank, Role
from everserve.tables.members import Members, Worker, WorkerState
from everserve.tables.placement import Placement
from everserve.tables.remembered import remembered
from everserve.tables.routes import Routes
from everserve.tables.slots import EMPTY, HeldSlots
from everserve.words import plural

_MAX_LISTED = 8

Have = Mapping[Rank, HeldSlots]  # what workers report
Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What violates each of the three conditions."""

    peers: tuple[str, ...] = ()
    coverage: tuple[str, ...] = ()
    epochs: tuple[str, ...] = ()

    @property
    def violations(self) -> tuple[str, ...]:
        """Why streams may have to wait."""
        return self.peers + self.coverage


class Checked(NamedTuple):
    """What is wrong or degraded in routes: the same for as long as expert workers, what they hold, the placement and
    the routes are the same."""

    peers: tuple[str, ...] = ()
    coverage: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()


def check(members: Members, placement: Placement, have: Have, routes: Routes) -> Checked:
    """The part of the conditions, and of what is degraded, that takes long where there are hundreds of workers."""
    wrong_shape = _wrong_shape(placement, routes)
    if wrong_shape:
        return Checked(coverage=tuple(wrong_shape))
    return Checked(
        peers=tuple(_wrong_peers(members, placement, have, routes)),
        coverage=tuple(_wrong_places(placement, have, routes)),
        degraded=tuple(_degraded_places(placement, routes)),
    )


def conditions(
    members: Members,
    placement: Placement | None,
    have: Have,
    routes: Routes | None,
    acknowledged: Mapping[Rank, Epoch],
    checked: Checked | None = None,
) -> Conditions:
    """All three conditions. `acknowledged`: the epoch of the routes that each attention worker uses, by its report.
    `checked`: if it is known."""
    peers: list[str] = []
    coverage: list[str] = []
    if not any(_serves(worker, Role.ATTENTION) for worker in members.workers):
        peers.append("no attention worker is ready")
    if placement is not None and routes is not None:
        if members.epoch != routes.epoch:
            peers.append(f"members are of epoch {members.epoch}, routes of epoch {routes.epoch}")
        checked = checked or check(members, placement, have, routes)
        peers += checked.peers
        coverage += checked.coverage
    elif placement is not None:
        coverage.append("there are expert workers but no routes to them")
    elif routes is not None:
        coverage.append("there are routes but no expert workers")
    epochs = Behind(members, acknowledged).sentences() if routes is not None else ()
    return Conditions(peers=tuple(peers), coverage=tuple(coverage), epochs=epochs)


class Behind:
    """The third condition alone. It changes more often than the tables, by one attention worker at a time."""

    def __init__(self, members: Members, acknowledged: Mapping[Rank, Epoch]) -> None:
        self._published = members.epoch
        ready = [worker.rank for worker in members.workers if _serves(worker, Role.ATTENTION)]
        self._late = {rank: self._words(rank, acknowledged.get(rank)) for rank in ready}  # "" if it is not

    def note(self, rank: Rank, epoch: Epoch) -> bool:
        """This worker uses the routes of this epoch. Returns whether that changes the condition."""
        words = self._words(rank, epoch)
        if self._late.get(rank, words) == words:
            return False
        self._late[rank] = words
        return True

    def sentences(self) -> tuple[str, ...]:
        return tuple(filter(None, self._late.values()))

    def _words(self, rank: Rank, epoch: Epoch | None) -> str:
        if epoch == self._published:
            return ""
        if epoch is None:
            return f"rank {rank} has not said which routes it uses; published is epoch {self._published}"
        return f"rank {rank} uses routes of epoch {epoch}, published is {self._published}"


def degraded(
    members: Members, placement: Placement | None, routes: Routes | None, checked: Checked | None = None
) -> tuple[str, ...]:
    """What is degraded without breaking the contract: workers that are not ready or slow, masked experts, experts
    with too few places."""
    found = []
    for worker in members.workers:
        if worker.state is not WorkerState.READY:
            note = f": {worker.note}" if worker.note else ""
            found.append(f"rank {worker.rank} ({'+'.join(worker.roles)}) is {worker.state}{note}")
        elif worker.is_slow:
            found.append(f"rank {worker.rank} ({'+'.join(worker.roles)}) is slow: {worker.note}")
    if checked is not None:
        found += checked.degraded
    elif placement is not None and routes is not None and not _wrong_shape(placement, routes):
        found += _degraded_places(placement, routes)
    return tuple(found)


def _degraded_places(placement: Placement, routes: Routes) -> list[str]:
    found = _sentences(placement, routes.mask() != 0, "{are} masked: tokens are computed without {them}")
    planned_LE = _num_planned(placement)
    have_LE = np.count_nonzero(routes.array()[..., 0] != NO_RANK, axis=2)
    short_LE = (have_LE > 0) & (have_LE < planned_LE)  # no place at all is a violation
    for have, planned in np.unique(np.stack([have_LE[short_LE], planned_LE[short_LE]]), axis=1).T.tolist():
        which_LE = short_LE & (have_LE == have) & (planned_LE == planned)
        found += _sentences(placement, which_LE, f"{{have}} {have} of {planned} places")
    return found


def _serves(worker: Worker, role: Role) -> bool:
    return worker.state is WorkerState.READY and role in worker.roles


def _wrong_shape(placement: Placement, routes: Routes) -> list[str]:
    planned, routed = (len(placement.calls), placement.num_experts), (routes.num_layers, routes.num_experts)
    if planned == routed and (routes.exists() == _exists(placement)).all():
        return []
    if planned == routed:
        return ["routes and placement are for different numbers of experts in some layers"]
    return [f"routes are for {routed[0]} layers of {routed[1]} experts, the placement for {planned[0]} of {planned[1]}"]


def _wrong_peers(members: Members, placement: Placement, have: Have, routes: Routes) -> list[str]:
    """Routes that lead to the wrong workers."""
    found = []
    rank_LEC = routes.array()[..., 0].astype(np.int64)
    workers = {worker.rank: worker for worker in members.workers}
    ready = [worker.rank for worker in members.workers if _serves(worker, Role.EXPERT)]
    ready_LE = _num_held(placement, have, ready) > 0
    for rank in sorted({Rank(int(rank)) for rank in np.unique(rank_LEC[rank_LEC != NO_RANK])}):
        if (why := _why_not(workers.get(rank))) is not None:
            found.append(f"routes lead to rank {rank}, which {why}")
        elif workers[rank].state is WorkerState.LEAVING:
            too_soon_LE = (rank_LEC == rank).any(axis=2) & ready_LE
            what = f"{{are}} routed to rank {rank}, which is leaving, though a ready worker has {{them}}"
            found += _sentences(placement, too_soon_LE, what)
    return found


def _wrong_places(placement: Placement, have: Have, routes: Routes) -> list[str]:
    """Experts without a place, and invalid places."""
    found = []
    table = routes.array().astype(np.int64)
    rank_LEC, slot_LEC = table[..., 0], table[..., 1]
    named_LEC = rank_LEC != NO_RANK
    held_LEC = _held(placement, have, rank_LEC, slot_LEC)
    wrong_LEC = named_LEC & (held_LEC != np.arange(placement.num_experts)[None, :, None])
    for rank in np.unique(rank_LEC[wrong_LEC]):
        which_LE = (wrong_LEC & (rank_LEC == rank)).any(axis=2)
        found += _sentences(placement, which_LE, f"{{are}} routed to a slot of rank {rank} that does not hold {{them}}")
    in_order_LEC = np.sort(rank_LEC, axis=2)
    twice_LE = ((in_order_LEC[..., 1:] == in_order_LEC[..., :-1]) & (in_order_LEC[..., 1:] != NO_RANK)).any(axis=2)
    found += _sentences(placement, twice_LE, "{have} the same worker twice among {their} places")
    gap_LE = (~named_LEC[..., :-1] & named_LEC[..., 1:]).any(axis=2)  # readers stop at the first NO_RANK
    found += _sentences(placement, gap_LE, "{have} a gap among {their} places")
    is_lost_LE = _exists(placement) & ~named_LEC.any(axis=2) & (routes.mask() == 0)
    found += _sentences(placement, is_lost_LE, "{have} no place")
    return found


def _exists(placement: Placement) -> Bools:
    """[call][expert]: whether there is such an expert."""
    num_experts_L = np.array([call.num_shards for call in placement.calls], np.int64)
    exists_LE: Bools = np.arange(placement.num_experts) < num_experts_L[:, None]
    return exists_LE


def _why_not(worker: Worker | None) -> str | None:
    """Why no route may lead to this worker; None if some may."""
    if worker is None:
        return "is not a member"
    if worker.state not in (WorkerState.READY, WorkerState.LEAVING):
        return f"is {worker.state}"
    if Role.EXPERT not in worker.roles:
        return "does not have the expert role"
    return None


def _held(placement: Placement, have: Have, rank_LEC: Ints, slot_LEC: Ints) -> Ints:
    """What the named slots hold; EMPTY where there is no such slot."""
    num_seats, num_slots = len(have), max((held.num_slots for held in have.values()), default=0)
    experts_NLS = np.full((num_seats + 1, len(placement.moe_layers), num_slots + 1), EMPTY, np.int64)
    seat_R = np.full(2 + max([*have, rank_LEC.max(initial=NO_RANK)]), num_seats)  # the last seat and slot: none
    for index, (rank, held) in enumerate(have.items()):
        layer_F, slot_F, expert_F = held.filled
        experts_NLS[index, layer_F, slot_F] = expert_F
        seat_R[rank] = index
    seat_LEC = seat_R[rank_LEC]
    slot_LEC = np.where((slot_LEC >= 0) & (slot_LEC < num_slots), slot_LEC, num_slots)
    layer_LEC = np.arange(len(placement.moe_layers))[:, None, None]
    held_LEC: Ints = experts_NLS[seat_LEC, layer_LEC, slot_LEC]
    return held_LEC


def _num_held(placement: Placement, have: Have, ranks: Collection[Rank]) -> Ints:
    """[call][expert]: how many slots of these workers hold it."""
    num_LE = np.zeros((len(placement.moe_layers), placement.num_experts), np.int64)
    counted = frozenset(ranks)
    for rank, held in have.items():
        if rank in counted:
            layer_F, _, expert_F = held.filled
            num_LE[layer_F, expert_F] += 1  # a worker holds an expert once per layer
    return num_LE


@remembered
def _num_planned(placement: Placement) -> Ints:
    """[call][expert]: how many places it should have."""
    num_LE = np.zeros((len(placement.moe_layers), placement.num_experts), np.int64)
    for seat in placement.seats:
        for layer in range(len(placement.moe_layers)):
            num_LE[layer, list(seat.experts(layer))] += 1
    return num_LE


def _sentences(placement: Placement, which_LE: Bools, what: str) -> list[str]:
    """One sentence for all layers in which the same experts, slices or heads are concerned."""
    layers_of: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for call, row_E in zip(placement.calls, which_LE, strict=True):
        experts = tuple(int(expert) for expert in np.flatnonzero(row_E))
        if experts:
            layers_of.setdefault((call.kind, experts), []).append(call.layer)
    sentences = []
    for (kind, experts), layers in layers_of.items():
        one = len(experts) == 1
        words = {"have": "has", "are": "is", "them": "it", "their": "its"}
        said = what.format(**(words if one else {word: word for word in words}))
        of = f"of {plural('layer', len(layers))} {_ranges(layers)}"
        if one:
            sentences.append(f"{kind} {experts[0]} {of} {said}")
        else:
            sentences.append(f"{len(experts)} {kind}s {of} {said}: {_listed(experts)}")
    return sentences


def _ranges(numbers: Iterable[int]) -> str:
    """3, 4, 5, 9 -> "3-5, 9"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MAX_LISTED]))
    return shown + (", ..." if len(numbers) > _MAX_LISTED else "")
