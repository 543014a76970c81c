"""Memory that experts can come from: that of other seats, and the backup.

It is opened, and made ready for copies, when it is offered, so that a fill only has to copy.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from everserve.errors import EverserveError
from everserve.memory.weights.backup_filling import BackupFilling, CopyOut
from everserve.memory.weights.expert_memory import ExpertMemory
from everserve.memory.weights.found import At, Copy, Found, Loan
from everserve.memory.weights.slot_table import Entry, SlotTable
from everserve.tables.ids import Rank
from everserve.tables.memory import MemoryName
from everserve.tables.slots import Place, Source

log = logging.getLogger(__name__)

To_contra = TypeVar("To_contra", contravariant=True)


class OpenSeat(Protocol[At]):
    """The memory of another seat."""

    table: SlotTable
    is_near: bool  # ops can compute with what lies there

    def at(self, place: Place) -> At: ...

    def copy(self, place: Place, expert: int) -> Callable[[At], Copy]: ...

    def close(self) -> None:
        """Nothing that reads it is running or queued, or it does no harm."""


class OpenBackup(Protocol[To_contra]):
    memory: ExpertMemory

    def find(self, call_index: int, expert: int) -> tuple[Place, Entry] | None:
        """Where this expert is, if it can be copied from there now."""

    def copy(self, place: Place, expert: int) -> Callable[[To_contra], Copy]: ...

    def close(self) -> None:
        """Nothing that reads it is running or queued, or it does no harm."""


class Opener(Protocol[At]):
    """Both take over the descriptors: the weights, and their table."""

    def open_seat(self, rank: Rank, weights: MemoryName, fds: Sequence[int]) -> OpenSeat[At]: ...

    def open_backup(self, fds: Sequence[int]) -> OpenBackup[At]: ...


class Offers(Generic[At]):
    """`identity`: of experts that are ours. `copy_out`, `first_layer`: how the backup is filled (backup_filling.py)."""

    def __init__(self, opener: Opener[At], identity: bytes, copy_out: CopyOut, first_layer: int = 0) -> None:
        self._opener = opener
        self._identity = identity
        self._copy_out, self._first_layer = copy_out, first_layer
        self._names: dict[Rank, MemoryName] = {}
        self._seats: dict[Rank, OpenSeat[At]] = {}
        self.backup: OpenBackup[At] | None = None
        self.filling: BackupFilling | None = None
        self._is_to_fill = False

    # -- offered and withdrawn -------------------------------------------------------------------

    @property
    def seats(self) -> list[OpenSeat[At]]:
        """Seats whose experts are ours."""
        return [seat for seat in [*self._seats.values()] if seat.table.has(self._identity)]

    def has(self, rank: Rank, weights: MemoryName) -> bool:
        return self._names.get(rank) == weights

    def add(self, rank: Rank, weights: MemoryName, fds: Sequence[int]) -> None:
        """Memory that cannot be used is not an error: there are other sources."""
        assert rank not in self._seats, rank
        try:
            self._seats[rank] = self._opener.open_seat(rank, weights, fds)
        except (EverserveError, OSError, ValueError) as error:  # e.g. a device that ours does not reach
            log.warning("%s cannot be used: %s", weights.name, error)
        else:
            self._names[rank] = weights

    def remove(self, rank: Rank) -> None:
        seat = self._seats.pop(rank, None)
        if seat is not None:
            del self._names[rank]
            seat.close()

    def add_backup(self, weights: MemoryName, fds: Sequence[int]) -> None:
        self.remove_backup()
        try:
            self.backup = self._opener.open_backup(fds)
        except (EverserveError, OSError, ValueError) as error:
            log.warning("%s cannot be used: %s", weights.name, error)
            return
        self.backup.memory.table.claim(self._identity, owner=None)
        if self._is_to_fill:
            self._begin_filling()

    def remove_backup(self) -> None:
        if self.filling is not None:
            self.filling.stop()  # it may still write to the memory, which is there as long as it has it
        if self.backup is not None:
            self.backup.close()
        self.backup = self.filling = None

    def fill_backups(self) -> None:
        """From now on: the one that there is, and all that come."""
        self._is_to_fill = True
        self._begin_filling()

    def _begin_filling(self) -> None:
        if self.backup is not None:
            self.filling = BackupFilling(self.backup.memory, self._copy_out, self._first_layer)
            self.filling.start()

    def close(self) -> None:
        """Ends what this process does with memory of others, as its death would."""
        if self.filling is not None:
            self.filling.stop()
            self.filling.join()
        for seat in self._seats.values():
            seat.table.close()

    # -- looked for ------------------------------------------------------------------------------

    def lent(self, call_index: int, expert: int) -> Iterator[Found[At]]:
        """This expert in memory that ops of this worker reach."""
        for rank, seat in [*self._seats.items()]:
            if seat.is_near and self._seats.get(rank) is seat:
                yield from self._in_seat(Source.MAPPED, rank, seat, call_index, expert)

    def elsewhere(self, call_index: int, expert: int) -> Iterator[Found[At]]:
        """This expert in memory to copy it from, the cheapest first. While one is tried others may be withdrawn."""
        for rank, seat in sorted(self._seats.items(), key=lambda item: not item[1].is_near):
            if self._seats.get(rank) is seat:
                yield from self._in_seat(Source.PEER, rank, seat, call_index, expert)
        if self.backup is not None:
            yield from self._in_backup(self.backup, call_index, expert)

    def _in_seat(
        self, source: Source, rank: Rank, seat: OpenSeat[At], call_index: int, expert: int
    ) -> Iterator[Found[At]]:
        found = seat.table.find(call_index, expert) if seat.table.has(self._identity) else None
        if found is None:
            return
        place, entry = found
        yield Found(
            source,
            seat.copy(place, expert),
            checksum=lambda: entry.checksum,
            is_unchanged=lambda: seat.table.read(place) == entry,
            rank=rank,
            at=seat.at(place) if source is Source.MAPPED else None,
            loan=Loan(seat.table, place, entry) if source is Source.MAPPED else None,
        )

    def _in_backup(self, backup: OpenBackup[At], call_index: int, expert: int) -> Iterator[Found[At]]:
        found = backup.find(call_index, expert)
        if found is None:
            return
        place, entry = found
        yield Found(
            Source.HOST,
            backup.copy(place, expert),
            checksum=lambda: entry.checksum,
            is_unchanged=lambda: backup.memory.table.read(place) == entry,
        )
