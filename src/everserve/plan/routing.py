"""Which places of an expert to use, in which order: ready workers first, and so that a death spreads its load.

Places come from the workers' reports. The placement only says which of them are preferred."""

from collections import Counter
from collections.abc import Collection, Mapping

import msgspec

from everserve.tables.ids import Epoch, Rank, SlotId
from everserve.tables.placement import Placement
from everserve.tables.routes import Routes
from everserve.tables.slots import EMPTY, HeldSlots

Place = tuple[Rank, SlotId]


Have = Mapping[Rank, HeldSlots]  # what workers report


def make_routes(
    epoch: Epoch,
    placement: Placement,
    have: Have,
    ready: Collection[Rank],
    leaving: Collection[Rank] = (),
    demoted: Collection[Rank] = (),
) -> Routes:
    """The active places first, as far as their workers are ready, in the order of ranks; then the other places on ready
    workers; then, in the same order, those on ready workers that are `demoted`. Experts that no ready worker holds are
    routed to leaving workers, in the same way.

    Layers with the same pattern are computed once: this runs while streams wait for the new table.
    """
    seats = [_Seat(rank, held, placement) for rank, held in sorted(have.items())]
    groups = [  # ready ones, then leaving ones; in both, demoted ones last
        [seat for seat in seats if seat.rank in ranks and (seat.rank in demoted) == is_demoted]
        for ranks in (ready, leaving)
        for is_demoted in (False, True)
    ]
    patterns: dict[tuple[int, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]], int] = {}
    pattern_of_layer = []
    distinct: list[list[list[Place]]] = []
    num_active: list[list[int]] = []
    for layer, call in enumerate(placement.calls):
        pattern = call.num_shards, tuple((s.experts[layer], s.active[layer]) for group in groups for s in group)
        if pattern not in patterns:
            patterns[pattern] = len(patterns)
            places = [_places(group, layer, call.num_shards) for group in groups]
            distinct.append([a + b or c + d for a, b, c, d in zip(*places, strict=True)])
            actives = (_num_active(seats, layer, call.num_shards) for seats in groups[:2])
            num_active.append([a if first else b for first, a, b in zip(places[0], *actives, strict=True)])
        pattern_of_layer.append(patterns[pattern])
    routes = Routes.of(epoch, distinct, num_active)
    table = routes.array()[pattern_of_layer].tobytes()
    active = routes.num_active()[pattern_of_layer].tobytes() if routes.active else b""
    widths = tuple(routes.widths[pattern] for pattern in pattern_of_layer) if routes.widths else ()
    num_layers = len(pattern_of_layer)
    return msgspec.structs.replace(routes, num_layers=num_layers, table=table, active=active, widths=widths)


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


def _num_active(seats: list[_Seat], layer: int, num_experts: int) -> list[int]:
    """How many places an expert is dealt to; 1 if none of them is active, because then a shadow serves."""
    found = [0] * num_experts
    for seat in seats:
        for expert in set(seat.active[layer]).intersection(seat.experts[layer]):
            found[expert] += 1
    return [number or 1 for number in found]


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
