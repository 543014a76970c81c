"""Which places of an expert to use, in which order: ready ones as long as there are any, and so that a death spreads
its load."""

from collections import Counter
from collections.abc import Collection

import msgspec

from everserve.tables.ids import Epoch, Rank, SlotId
from everserve.tables.placement import EMPTY, Placement, SeatSlots
from everserve.tables.routes import Routes

Place = tuple[Rank, SlotId]


def make_routes(epoch: Epoch, placement: Placement, ready: Collection[Rank], leaving: Collection[Rank] = ()) -> Routes:
    """The active place first, if its worker is ready, then the shadows that are. Experts that no ready worker has go to
    the workers that are leaving.

    Layers that look alike are computed once: this runs while streams wait for the new table.
    """
    stay = [seat for seat in placement.seats if seat.rank in ready]
    leave = [seat for seat in placement.seats if seat.rank in leaving]
    patterns: dict[tuple[tuple[int, ...], ...], int] = {}
    pattern_of_layer = []
    distinct: list[list[list[Place]]] = []
    for layer in range(len(placement.moe_layers)):
        pattern = tuple(seat.experts[layer] for seat in stay + leave)
        if pattern not in patterns:
            patterns[pattern] = len(patterns)
            first, last = (_places(seats, layer, placement.num_experts) for seats in (stay, leave))
            distinct.append([places or others for places, others in zip(first, last, strict=True)])
        pattern_of_layer.append(patterns[pattern])
    routes = Routes.of(epoch, distinct)
    table = routes.array()[pattern_of_layer].tobytes()
    return msgspec.structs.replace(routes, num_layers=len(pattern_of_layer), table=table)


def _places(seats: list[SeatSlots], layer: int, num_experts: int) -> list[list[Place]]:
    """For each expert of this layer its places in these seats, in the order of use."""
    active: list[list[Place]] = [[] for _ in range(num_experts)]
    shadow: list[list[Place]] = [[] for _ in range(num_experts)]
    for seat in seats:
        for slot, expert in enumerate(seat.experts[layer]):
            if expert != EMPTY:
                (active if slot < seat.num_active else shadow)[expert].append((seat.rank, SlotId(slot)))
    return _ordered(active, shadow)


def _ordered(active: list[list[Place]], shadow: list[list[Place]]) -> list[list[Place]]:
    """For each expert its places in the order of use.

    An expert without an active place goes to its least loaded shadow. After that each place is followed by the shadow
    that inherits least from it so far, so that whoever dies next leaves about as much to each of the others.
    """
    routes = [list(places) for places in active]
    left = [list(places) for places in shadow]
    load = Counter(places[0][0] for places in routes if places)  # experts that a worker serves now
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
