"""The contract between the tables: what must hold after every transition, and what is missing though it holds.

An instance is valid if
- its tables are of one epoch;
- somebody can take requests: at least one ready worker has the attention role;
- routes lead only to ready workers with the expert role, and there to a slot that holds the expert; where no ready
  worker holds it, to one that is leaving;
- every expert of every layer has at least one such place, and no place counts twice.

Both functions return sentences for operators; none means all is well. An instance whose workers have both roles has no
expert seats: its placement and routes are None.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from everserve.tables.ids import Rank, Role
from everserve.tables.members import Members, Worker, WorkerState
from everserve.tables.placement import EMPTY, Placement
from everserve.tables.routes import NOBODY, Routes

_MAX_LISTED = 8

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


def violations(members: Members, placement: Placement | None, routes: Routes | None) -> tuple[str, ...]:
    """What breaks the contract."""
    found = []
    if not any(_serves(worker, Role.ATTENTION) for worker in members.workers):
        found.append("no attention worker is ready")
    if placement is not None and routes is not None:
        found += _route_violations(members, placement, routes)
    elif placement is not None:
        found.append("there are expert seats but no routes to them")
    elif routes is not None:
        found.append("there are routes but no expert seats")
    return tuple(found)


def degraded(members: Members, placement: Placement | None, routes: Routes | None) -> tuple[str, ...]:
    """What is missing without breaking the contract: workers that are not ready, experts with too few places."""
    found = []
    for worker in members.workers:
        if worker.state is not WorkerState.READY:
            note = f": {worker.note}" if worker.note else ""
            found.append(f"rank {worker.rank} ({'+'.join(worker.roles)}) is {worker.state}{note}")
    if placement is not None and routes is not None and not _shape_violations(placement, routes):
        planned_LE = _num_places(placement, [seat.rank for seat in placement.seats])
        have_LE = np.count_nonzero(routes.array()[..., 0] != NOBODY, axis=2)
        short_LE = (have_LE > 0) & (have_LE < planned_LE)  # no place at all is a violation
        for have, planned in np.unique(np.stack([have_LE[short_LE], planned_LE[short_LE]]), axis=1).T.tolist():
            which_LE = short_LE & (have_LE == have) & (planned_LE == planned)
            found += _sentences(placement, which_LE, f"{{have}} {have} of {planned} places")
    return tuple(found)


def _serves(worker: Worker, role: Role) -> bool:
    return worker.state is WorkerState.READY and role in worker.roles


def _shape_violations(placement: Placement, routes: Routes) -> list[str]:
    planned, routed = (len(placement.moe_layers), placement.num_experts), (routes.num_layers, routes.num_experts)
    if planned == routed:
        return []
    return [f"routes are for {routed[0]} layers of {routed[1]} experts, the placement for {planned[0]} of {planned[1]}"]


def _route_violations(members: Members, placement: Placement, routes: Routes) -> list[str]:
    found = []
    if members.epoch != routes.epoch:
        found.append(f"members are of epoch {members.epoch}, routes of epoch {routes.epoch}")
    if wrong_shape := _shape_violations(placement, routes):
        return found + wrong_shape
    table = routes.array().astype(np.int64)
    rank_LEC, slot_LEC = table[..., 0], table[..., 1]
    named_LEC = rank_LEC != NOBODY

    workers = {worker.rank: worker for worker in members.workers}
    ready_LE = _num_places(placement, [worker.rank for worker in members.workers if _serves(worker, Role.EXPERT)]) > 0
    for rank in sorted({Rank(int(rank)) for rank in np.unique(rank_LEC[named_LEC])}):
        if (why := _why_not(workers.get(rank))) is not None:
            found.append(f"routes lead to rank {rank}, which {why}")
        elif workers[rank].state is WorkerState.LEAVING:
            too_soon_LE = (rank_LEC == rank).any(axis=2) & ready_LE
            what = f"{{are}} routed to rank {rank}, which is leaving, though a ready worker has {{them}}"
            found += _sentences(placement, too_soon_LE, what)

    held_LEC = _held(placement, rank_LEC, slot_LEC)
    wrong_LEC = named_LEC & (held_LEC != np.arange(placement.num_experts)[None, :, None])
    for rank in np.unique(rank_LEC[wrong_LEC]):
        which_LE = (wrong_LEC & (rank_LEC == rank)).any(axis=2)
        found += _sentences(placement, which_LE, f"{{are}} routed to a slot of rank {rank} that does not hold {{them}}")

    in_order_LEC = np.sort(rank_LEC, axis=2)
    twice_LE = ((in_order_LEC[..., 1:] == in_order_LEC[..., :-1]) & (in_order_LEC[..., 1:] != NOBODY)).any(axis=2)
    found += _sentences(placement, twice_LE, "{have} the same worker twice among {their} places")
    gap_LE = (~named_LEC[..., :-1] & named_LEC[..., 1:]).any(axis=2)  # readers stop at the first NOBODY
    found += _sentences(placement, gap_LE, "{have} a gap among {their} places")
    found += _sentences(placement, ~named_LEC.any(axis=2), "{have} no place")
    return found


def _why_not(worker: Worker | None) -> str | None:
    """Why routes may lead to this worker for no expert; None if they may for some."""
    if worker is None:
        return "is not a member"
    if worker.state not in (WorkerState.READY, WorkerState.LEAVING):
        return f"is {worker.state}"
    if Role.EXPERT not in worker.roles:
        return "does not have the expert role"
    return None


def _held(placement: Placement, rank_LEC: Ints, slot_LEC: Ints) -> Ints:
    """What the named slots hold; EMPTY where there is no such slot."""
    num_seats, num_slots = len(placement.seats), max((seat.num_slots for seat in placement.seats), default=0)
    experts_NLS = np.full((num_seats + 1, len(placement.moe_layers), num_slots + 1), EMPTY, np.int64)
    seat_LEC = np.full(rank_LEC.shape, num_seats)  # the last seat and the last slot stand for none
    for index, seat in enumerate(placement.seats):
        experts_NLS[index, :, : seat.num_slots] = seat.experts
        seat_LEC[rank_LEC == seat.rank] = index
    slot_LEC = np.where((slot_LEC >= 0) & (slot_LEC < num_slots), slot_LEC, num_slots)
    layer_LEC = np.arange(len(placement.moe_layers))[:, None, None]
    held_LEC: Ints = experts_NLS[seat_LEC, layer_LEC, slot_LEC]
    return held_LEC


def _num_places(placement: Placement, ranks: Collection[Rank]) -> Ints:
    """[layer index][expert]: how many slots of these seats hold it."""
    num_LE = np.zeros((len(placement.moe_layers), placement.num_experts), np.int64)
    for seat in placement.seats:
        if seat.rank not in ranks:
            continue
        experts_LS = np.array(seat.experts, np.int64)
        layer, slot = np.nonzero(experts_LS != EMPTY)
        num_LE[layer, experts_LS[layer, slot]] += 1  # a seat holds an expert once per layer
    return num_LE


def _sentences(placement: Placement, which_LE: Bools, what: str) -> list[str]:
    """One sentence for all layers in which the same experts are concerned."""
    layers_of: dict[tuple[int, ...], list[int]] = {}
    for number, row_E in zip(placement.moe_layers, which_LE, strict=True):
        experts = tuple(int(expert) for expert in np.flatnonzero(row_E))
        if experts:
            layers_of.setdefault(experts, []).append(number)
    sentences = []
    for experts, layers in layers_of.items():
        one = len(experts) == 1
        words = {"have": "has", "are": "is", "them": "it", "their": "its"}
        said = what.format(**(words if one else {word: word for word in words}))
        of = f"of layer{'s' if len(layers) > 1 else ''} {_ranges(layers)}"
        if one:
            sentences.append(f"expert {experts[0]} {of} {said}")
        else:
            sentences.append(f"{len(experts)} experts {of} {said}: {_listed(experts)}")
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
