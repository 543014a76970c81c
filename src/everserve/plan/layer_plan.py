"""One layer while it is planned: which workers should hold which experts, and which of them serve."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from everserve.plan.dealing import Dealing, Loads
from everserve.tables.ids import Rank

# rank, active experts, shadows
SeatBefore = tuple[Rank, tuple[int, ...], tuple[int, ...]]


class Room(NamedTuple):
    """An expert worker that there should be."""

    rank: Rank
    device: int  # workers on one device are lost together
    num_slots: int  # per layer; of the layer with the most, if they differ
    slots: tuple[int, ...] = ()  # by index of the layer, if they differ; in one without any it takes no part
    num_pieces: int = 0  # the most heads in all layers together; 0: as many as there are slots for

    def of_layer(self, index: int) -> "Room":
        return self._replace(num_slots=self.slots[index], slots=()) if self.slots else self


class LayerPlan:
    """`places[e]`: the ranks that should hold expert e; `homes[e]`: those of them that serve it, its active places.
    The last `num_dealt` experts should be served by all workers. No other has more places than `most_places` (None: as
    many as there are slots for). With `num_shadows` further places for each worker, all together have `num_wanted`, and
    no more are kept. Of equals the worker with number `turn` is the first, then the next one."""

    def __init__(
        self,
        rooms: Sequence[Room],
        loads: Loads,
        before: Sequence[SeatBefore],
        dealing: Dealing | None = None,
        num_dealt: int = 0,
        most_places: int | None = None,
        turn: int = 0,
        num_shadows: int | None = None,
    ) -> None:
        self.rooms = rooms
        self.most_places = most_places
        self.order = {room.rank: (i - turn) % len(rooms) for i, room in enumerate(rooms)}
        self.num_homeless = 0  # experts that no worker served before
        self.loads = loads
        self.dealing = dealing or Dealing()
        self.by_rank = {room.rank: room for room in rooms}
        self.places: list[list[Rank]] = [[] for _ in loads]
        self.homes: list[list[Rank]] = [[] for _ in loads]
        self.held: dict[Rank, set[int]] = {room.rank: set() for room in rooms}
        self.dealt = range(len(loads) - num_dealt, len(loads))
        # Places that every other expert gets before any gets more, as far as there are devices.
        num_left = sum(room.num_slots for room in rooms) - num_dealt * len(rooms)
        self.num_copies = max(num_left // max(len(loads) - num_dealt, 1), 1)
        if most_places is not None:
            self.num_copies = min(self.num_copies, most_places)
        self.num_wanted: int | None = None
        if num_shadows is not None:
            num_slots = sum(room.num_slots for room in rooms)
            asked = min(num_slots, len(loads) + num_shadows * len(rooms))
            self.num_wanted = max(self.num_copies * len(loads), asked)
        for rank, active, shadows in before:
            for expert in (*active, *shadows) if rank in self.by_rank else ():
                self.put(expert, rank)
                if expert in active:
                    self.homes[expert].append(rank)

    def active_on(self, rank: Rank) -> tuple[int, ...]:
        return tuple(expert for expert in sorted(self.held[rank]) if rank in self.homes[expert])

    def shadows_on(self, rank: Rank) -> tuple[int, ...]:
        return tuple(expert for expert in sorted(self.held[rank]) if rank not in self.homes[expert])

    def put(self, expert: int, rank: Rank) -> None:
        self.places[expert].append(rank)
        self.held[rank].add(expert)

    def take(self, expert: int, rank: Rank) -> None:
        self.places[expert].remove(rank)
        self.held[rank].discard(expert)
        if rank in self.homes[expert]:
            self.homes[expert].remove(rank)

    def room_on(self, rank: Rank) -> int:
        return self.by_rank[rank].num_slots - len(self.held[rank])

    def may_go(self, expert: int, rank: Rank | None, to: Rank) -> bool:
        """Whether its copy on `rank` (None: another copy) may be on `to`: no two copies are on one device."""
        devices = {self.by_rank[place].device for place in self.places[expert] if place != rank}
        return to not in self.places[expert] and self.by_rank[to].device not in devices

    def work(self) -> dict[Rank, float]:
        """What each worker has to compute."""
        work = dict.fromkeys(self.held, 0.0)
        for expert, homes in enumerate(self.homes):
            for rank, part in self.parts(expert, homes).items():
                work[rank] += part
        return work

    def parts(self, expert: int, homes: Sequence[Rank]) -> Mapping[Rank, float]:
        """What an expert with these active places adds to each of them."""
        if len(homes) < 2:  # nearly always
            return {homes[0]: self.loads[expert]} if homes else {}
        shares = self.dealing.shares(expert, len(homes))
        return {rank: share * self.loads[expert] for rank, share in zip(sorted(homes), shares, strict=True)}
