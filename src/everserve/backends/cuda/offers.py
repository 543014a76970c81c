"""Memory that experts can come from: that of other seats, and the backup in host memory.

It is mapped, and registered where that is needed, when it is offered, so that a fill only has to copy. Memory of seats
on the same GPU is mapped behind the own experts (arena_range.py): kernels can compute with what lies there.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from everserve.backends.cuda.arena_range import ArenaRange
from everserve.backends.cuda.host_backup import HostBackup
from everserve.backends.cuda.transfer import IN_DEVICE, Feed, MemoryFeed, NoFeed
from everserve.memory.device import CudaError, Driver, Mapping
from everserve.memory.weights.expert_memory import ExpertMemory
from everserve.memory.weights.slot_table import Entry, SlotTable
from everserve.plan.expert_memory import ExpertMemoryPlan
from everserve.tables.ids import Rank
from everserve.tables.memory import Memory
from everserve.tables.slots import Place, Source
from everserve.worker.backup_filling import BackupFilling, CopyOut

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """An expert in one of the sources. `checksum`: what its bytes should sum up to, known at the end; None if they
    cannot be compared with anything. `is_unchanged`: whether that still describes what was there."""

    source: Source
    feed: Feed
    checksum: Callable[[], int | None]
    is_unchanged: Callable[[], bool]
    rank: Rank | None = None  # whose memory it is
    place: int | None = None  # in the range, if kernels are to compute with it where it is
    loan: "Loan | None" = None  # likewise: it is taken before anything is read


@dataclass(frozen=True)
class Loan:
    """A slot of another seat's memory: while it is borrowed, no process changes it."""

    table: SlotTable
    at: Place
    entry: Entry

    def take(self) -> bool:
        """False: it does not hold the expert any more."""
        return self.table.borrow(self.at, self.entry)

    def end(self) -> None:
        """No kernel computes with it any more."""
        self.table.give_back(self.at)


@dataclass(frozen=True)
class _Seat:
    """The memory of another seat. `mapping` None: it lies in the range."""

    weights: Memory
    table: SlotTable
    address: int
    mapping: Mapping | None


class Offers:
    """`plan`: the slots of every expert seat. `identity`: of experts that are ours. `copy_out`, `first_layer`: how the
    backup is filled (worker/backup_filling.py), which begins as soon as there is one."""

    def __init__(
        self,
        driver: Driver,
        arena_range: ArenaRange,
        plan: ExpertMemoryPlan,
        num_experts: int,
        identity: bytes,
        copy_out: CopyOut,
        first_layer: int = 0,
    ) -> None:
        self._driver = driver
        self._range = arena_range
        self._plan = plan
        self._backup_plan = plan.with_slots(num_experts)
        self._identity = identity
        self._seats: dict[Rank, _Seat] = {}
        self._copy_out, self._first_layer = copy_out, first_layer
        self._backup: HostBackup | None = None
        self._filling: BackupFilling | None = None

    # -- offered and withdrawn -------------------------------------------------------------------

    def has(self, rank: Rank, weights: Memory) -> bool:
        return rank in self._seats and self._seats[rank].weights == weights

    def add(self, rank: Rank, weights: Memory, fds: Sequence[int]) -> None:
        """Takes over the descriptors: the weights, and their table. Memory that cannot be used is not an error: there
        are other sources."""
        assert rank not in self._seats, rank
        weights_fd, table_fd = fds
        with ExitStack() as stack:
            stack.callback(os.close, weights_fd)
            stack.callback(os.close, table_fd)
            try:
                table = SlotTable(table_fd, self._plan.num_layers, self._plan.num_slots, read_only=True)
                address, mapping = self._map(rank, weights, weights_fd)
            except (CudaError, OSError, ValueError) as error:  # e.g. a device that ours does not reach
                log.warning("%s cannot be used: %s", weights.name, error)
                return
            self._seats[rank] = _Seat(weights, table, address, mapping)

    def _map(self, rank: Rank, weights: Memory, fd: int) -> tuple[int, Mapping | None]:
        if weights.gpu == self._driver.device and self._range.has_room(rank, weights.num_bytes):
            self._range.map(rank, fd, weights.num_bytes)
            return self._range.place_address(self._range.first_place(rank)), None
        mapping = Mapping(self._driver, fd, weights.num_bytes)
        return mapping.address, mapping

    def remove(self, rank: Rank) -> None:
        """Nothing that reads it may be running or queued."""
        seat = self._seats.pop(rank, None)
        if seat is None:
            return
        if seat.mapping is None:
            self._range.unmap(rank)
        else:
            seat.mapping.close()
        seat.table.close()

    def add_backup(self, weights: Memory, fds: Sequence[int]) -> None:
        """Takes over the descriptors."""
        self.remove_backup()
        try:
            memory = ExpertMemory(self._backup_plan, fds)
        except (OSError, ValueError) as error:
            log.warning("%s cannot be used: %s", weights.name, error)
            return
        memory.table.claim(self._identity, owner=None)
        self._backup = HostBackup(memory, self._driver)
        self._filling = BackupFilling(memory, self._copy_out, self._first_layer)
        self._filling.start()

    def remove_backup(self) -> None:
        """Nothing that reads it may be running or queued."""
        if self._backup is not None and self._filling is not None:
            self._filling.stop()  # it may still write to the memory, which is there as long as it has it
            self._backup.close()
            self._backup = self._filling = None

    @property
    def backup(self) -> HostBackup | None:
        return self._backup

    # -- looked for ------------------------------------------------------------------------------

    def lent(self, layer_index: int, expert: int) -> Iterator[Found]:
        """This expert in memory that kernels of this worker reach."""

        def feed(address: int) -> Feed:
            return NoFeed(self._range.place_bytes)

        for rank, seat in [*self._seats.items()]:
            if seat.mapping is None and self._is_there(rank, seat):
                yield from self._in_seat(Source.MAPPED, rank, seat, layer_index, expert, feed)

    def elsewhere(self, layer_index: int, expert: int) -> Iterator[Found]:
        """This expert in memory to copy it from, the cheapest first."""

        def feed(address: int) -> Feed:
            return MemoryFeed(address, self._range.place_bytes, IN_DEVICE)

        for rank, seat in sorted(self._seats.items(), key=lambda item: item[1].mapping is not None):
            if self._is_there(rank, seat):
                yield from self._in_seat(Source.PEER, rank, seat, layer_index, expert, feed)
        if self._backup is not None:
            yield from self._in_backup(self._backup, layer_index, expert)

    def _is_there(self, rank: Rank, seat: _Seat) -> bool:
        """It may be withdrawn while an earlier source is tried."""
        return self._seats.get(rank) is seat

    def _in_seat(
        self, source: Source, rank: Rank, seat: _Seat, layer_index: int, expert: int, feed: Callable[[int], Feed]
    ) -> Iterator[Found]:
        found = seat.table.find(layer_index, expert) if seat.table.has(self._identity) else None
        if found is None:
            return
        place, entry = found
        number = place.layer_index * self._plan.num_slots + place.slot
        yield Found(
            source,
            feed(seat.address + number * self._range.place_bytes),
            checksum=lambda: entry.checksum,
            is_unchanged=lambda: seat.table.read(place) == entry,
            rank=rank,
            place=self._range.first_place(rank) + number if source is Source.MAPPED else None,
            loan=Loan(seat.table, place, entry) if source is Source.MAPPED else None,
        )

    def _in_backup(self, backup: HostBackup, layer_index: int, expert: int) -> Iterator[Found]:
        num_bytes = self._range.place_bytes
        found = backup.find(layer_index, expert, num_bytes)
        if found is not None:
            place, entry = found
            yield Found(
                Source.HOST,
                backup.feed(place, num_bytes),
                checksum=lambda: entry.checksum,
                is_unchanged=lambda: backup.read(Place(*place)) == entry,
            )
