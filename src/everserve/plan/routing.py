"""Which places of an expert to use, in which order: ready workers first, and so that a death spreads its load.

Places come from the workers' reports. The placement only says which of them are preferred."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from everserve.tables.dealing import Dealer
from everserve.tables.ids import NO_RANK, Epoch, Rank, SlotId
from everserve.tables.placement import Placement, SeatExperts
from everserve.tables.remembered import remembered
from everserve.tables.routes import Routes
from everserve.tables.slots import EMPTY, HeldSlots

Place = tuple[Rank, SlotId]

_NUM_GROUPS, _FIRST_LEAVING = 4, 2

Have = Mapping[Rank, HeldSlots]  # what workers report


def make_routes(
    epoch: Epoch,
    placement: Placement,
    have: Have,
    ready: Collection[Rank],
    leaving: Collection[Rank] = (),
    demoted: Collection[Rank] = (),
    dealers: Sequence[Dealer] = (),
) -> Routes:
    """The active places first, as far as their workers are ready, in the order of ranks; then the other places on ready
    workers; then, in the same order, those on ready workers that are `demoted`. Experts that no ready worker holds are
    routed to leaving workers, in the same way. `dealers`: who asks, as there should be.

    This runs while streams wait for the new table: all layers are sorted at once, but for those in which an expert has
    several shadows. Of these, layers with the same pattern are computed once.
    """
    groups = [  # ready ones, then leaving ones; in both, demoted ones last
        [rank for rank in sorted(have) if rank in ranks and (rank in demoted) == is_demoted]
        for ranks in (ready, leaving)
        for is_demoted in (False, True)
    ]
    places = _Places(placement, have, groups)
    several = places.layers_with_several_shadows()
    candidates = places.candidates(without=several)
    seats = [[_Seat(rank, have[rank], placement) for rank in group] for group in groups] if several else []
    ordered = _in_order(placement, seats, several)
    num_candidates = max([candidates.shape[2], *(len(ones) for layer in ordered.values() for ones in layer)])
    table = np.full((*candidates.shape[:2], num_candidates, 2), NO_RANK, np.dtype("<i2"))
    table[:, :, : candidates.shape[2]] = candidates
    for layer, experts in ordered.items():
        for expert, ones in enumerate(experts):
            table[layer, expert, : len(ones)] = np.array(ones, np.int16).reshape(len(ones), 2)
    num_active, widths = places.num_active(), tuple(call.num_shards for call in placement.calls)
    return Routes(
        epoch=epoch,
        num_layers=len(placement.calls),
        num_experts=placement.num_experts,
        num_candidates=num_candidates,
        table=table.tobytes(),
        active=num_active.astype(np.uint8).tobytes() if (num_active > 1).any() else b"",
        widths=widths if len(set(widths)) > 1 else (),
        dealers=tuple(dealers),
    )


class _Places:
    """All filled slots of all workers, side by side: `key_F` is layer and expert in one number, `group_F` which group
    the worker is in, `is_shadow_F` whether it is not the active place."""

    def __init__(self, placement: Placement, have: Have, groups: Sequence[Sequence[Rank]]) -> None:
        self._num_layers, self._num_experts = len(placement.calls), placement.num_experts
        ranks = [(group, rank) for group, members in enumerate(groups) for rank in members]
        filled = [have[rank].filled for _, rank in ranks]
        lengths = [slots.shape[1] for slots in filled]
        layer_F, slot_F, expert_F = np.concatenate([np.zeros((3, 0), np.int64), *filled], axis=1)
        shadows = [_are_shadows(have[rank], placement.seat(rank)) for _, rank in ranks]
        self.key_F = layer_F * self._num_experts + expert_F
        self.slot_F = slot_F
        self.rank_F = np.repeat(np.array([rank for _, rank in ranks], np.int64), lengths)
        self.group_F = np.repeat(np.array([group for group, _ in ranks], np.int64), lengths)
        self.is_shadow_F = np.concatenate([np.zeros(0, bool), *shadows])

    def layers_with_several_shadows(self) -> frozenset[int]:
        """In these, shadows of an expert in one group take turns."""
        in_group = (self.key_F * _NUM_GROUPS + self.group_F)[self.is_shadow_F]
        num_shadows = np.bincount(in_group, minlength=self._num_keys * _NUM_GROUPS)
        layers = np.flatnonzero(num_shadows > 1) // (_NUM_GROUPS * max(self._num_experts, 1))
        return frozenset(layers.tolist())

    def candidates(self, without: Collection[int]) -> "NDArray[np.int64]":
        """[call][expert][candidate][rank, slot], in the order of groups, active ones first, by rank. Leaving
        workers where no ready one has the expert. Layers `without` are left empty."""
        is_served_K = np.zeros(self._num_keys, bool)
        is_served_K[self.key_F[self.group_F < _FIRST_LEAVING]] = True
        counts_F = (self.group_F < _FIRST_LEAVING) | ~is_served_K[self.key_F]
        if without:
            counts_F &= ~np.isin(self.key_F // self._num_experts, [*without])
        turn_F = (self.key_F * _NUM_GROUPS + self.group_F) * 2 + self.is_shadow_F
        chosen_C = np.flatnonzero(counts_F)
        chosen_C = chosen_C[np.lexsort((self.rank_F[chosen_C], turn_F[chosen_C]))]
        key_C = self.key_F[chosen_C]
        num_K = np.bincount(key_C, minlength=self._num_keys)
        position_C = np.arange(len(key_C)) - (np.cumsum(num_K) - num_K)[key_C]
        table = np.full((self._num_keys, num_K.max(initial=0), 2), NO_RANK, np.int64)
        table[key_C, position_C] = np.stack([self.rank_F[chosen_C], self.slot_F[chosen_C]], axis=1)
        return table.reshape(self._num_layers, self._num_experts, table.shape[1], 2)

    def num_active(self) -> "NDArray[np.int64]":
        """[call][expert]: how many places it is dealt to; 1 if none of them is active, because then a shadow
        serves."""
        is_first_F = self.group_F == 0
        active_K = [self._count((self.group_F == group) & ~self.is_shadow_F) for group in (0, 1)]
        num_K = np.where(self._count(is_first_F) > 0, *active_K)
        return np.maximum(num_K, 1).reshape(self._num_layers, self._num_experts)

    @property
    def _num_keys(self) -> int:
        return self._num_layers * self._num_experts

    def _count(self, which_F: "NDArray[np.bool_]") -> "NDArray[np.int64]":
        return np.bincount(self.key_F[which_F], minlength=self._num_keys)


@remembered
def _are_shadows(held: HeldSlots, planned: SeatExperts | None) -> "NDArray[np.bool_]":
    """Which filled slots are not active places."""
    layer_F, _, expert_F = held.filled
    if planned is None:
        return np.ones(len(layer_F), bool)
    layer_A, expert_A = planned.served
    width = 1 + max(expert_F.max(initial=0), expert_A.max(initial=0))
    return ~np.isin(layer_F * width + expert_F, layer_A * width + expert_A)


def _in_order(
    placement: Placement, groups: Sequence[list["_Seat"]], layers: Collection[int]
) -> dict[int, list[list[Place]]]:
    """For each of these layers, and each expert of it, its places in the order of use."""
    patterns: dict[object, list[list[Place]]] = {}
    found = {}
    for layer in sorted(layers):
        num_shards = placement.calls[layer].num_shards
        pattern = num_shards, tuple((s.experts[layer], s.active[layer]) for group in groups for s in group)
        if pattern not in patterns:
            places = [_places(group, layer, num_shards) for group in groups]
            patterns[pattern] = [a + b or c + d for a, b, c, d in zip(*places, strict=True)]
        found[layer] = patterns[pattern]
    return found


class _Seat:
    """The experts that a worker holds, and those for which it is the active place."""

    def __init__(self, rank: Rank, held: HeldSlots, placement: Placement) -> None:
        planned = placement.seat(rank)
        self.rank = rank
        self.experts = held.experts
        self.active = planned.active if planned is not None else ((),) * len(held.experts)


def _places(seats: list[_Seat], layer: int, num_experts: int) -> list[list[Place]]:
    """For each expert of this layer its places in these seats, in the order of use."""
    if not seats:
        return [[]] * num_experts
    active: list[list[Place]] = [[] for _ in range(num_experts)]
    shadow: list[list[Place]] = [[] for _ in range(num_experts)]
    for seat in seats:
        preferred = set(seat.active[layer])
        for slot, expert in enumerate(seat.experts[layer]):
            if expert != EMPTY:
                (active if expert in preferred else shadow)[expert].append((seat.rank, SlotId(slot)))
    return _ordered(active, shadow)


def _ordered(active: list[list[Place]], shadow: list[list[Place]]) -> list[list[Place]]:
    """For each expert its places in the order of use.

    An expert without an active place goes to its least loaded shadow. After that each place is followed by the shadow
    that inherits least from it so far, so that the next death spreads its load evenly over the other workers.
    """
    if all(len(places) < 2 for places in shadow):  # nearly always; this is called while streams wait
        return [first + second for first, second in zip(active, shadow, strict=True)]
    routes = [list(places) for places in active]
    left = [list(places) for places in shadow]
    load = Counter(rank for places in routes for rank, _ in places)  # experts that a worker serves now
    heirs = Counter[tuple[Rank, Rank]]()  # (before, after) -> experts that go from one to the other

    def serves_least(place: Place) -> tuple[int, int]:
        return load[place[0]], place[0]

    def inherits_least(place: Place) -> tuple[int, int, int]:
        return heirs[before, place[0]], load[place[0]], place[0]

    def fewest_choices_first() -> list[int]:
        return sorted((expert for expert, places in enumerate(left) if places), key=lambda expert: len(left[expert]))

    for expert in fewest_choices_first():
        if not routes[expert]:
            place = min(left[expert], key=serves_least)
            left[expert].remove(place)
            routes[expert].append(place)
            load[place[0]] += 1
    while any(left):
        for expert in fewest_choices_first():
            before = routes[expert][-1][0]
            place = min(left[expert], key=inherits_least)
            left[expert].remove(place)
            routes[expert].append(place)
            heirs[before, place[0]] += 1
    return routes
