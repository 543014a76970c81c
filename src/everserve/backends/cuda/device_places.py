"""Experts of an expert worker on a GPU in device memory of its seat: where they lie, how they are copied there, and how
kernels compute with them. memory/weights/slots.py decides what is copied when.

Places, numbered from the first of this seat on, are those of arena_range.py: kernels can compute with what lies in the
memory of another seat on the same GPU, which is mapped behind.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

from everserve.backends.cuda.arena_range import ArenaRange
from everserve.backends.cuda.host_backup import HostBackup
from everserve.backends.cuda.transfer import IN_DEVICE, CopyStream, Feed, MemoryFeed, NoFeed, Transfer
from everserve.memory.device import Driver, Mapping
from everserve.memory.weights.expert_memory import ExpertMemory
from everserve.memory.weights.found import Copy, Found
from everserve.memory.weights.slot_table import Entry, SlotTable
from everserve.plan.expert_memory import ExpertMemoryPlan
from everserve.tables.ids import Rank
from everserve.tables.memory import MemoryName
from everserve.tables.slots import Place, Source

# Polls without progress. A device has fewer queues than a process has streams: a copy may be queued behind a graph that
# waits for its bell, and gets its turn when the graphs before it have ended. Streams wait for what is not copied.
_STUCK, _STUCK_MAPPED = 10, 2


class FileFeeds(Protocol):
    """The experts in the model's files."""

    def feed(self, call_index: int, expert: int) -> tuple[Feed, Callable[[], int | None]]:
        """The feed of an expert and its checksum, known at the end. Raises if the files are not those that this
        instance serves.
        """


class SlotKernels(Protocol):
    """What is needed of `CudaServer`."""

    def empty(self, call_index: int, slot: int) -> None: ...
    def fence(self) -> Callable[[], bool]: ...
    def ring(self) -> None: ...
    def hold(self, call_index: int, slot: int, expert: int, place: int) -> None: ...
    def drain(self) -> None: ...


class _Copy:
    """A transfer beside graphs."""

    def __init__(self, transfer: Transfer, server: SlotKernels, patience: int) -> None:
        self._transfer = transfer
        self._server = server
        self._patience = patience
        self._is_given_up = False

    def poll(self) -> int | None:
        if self._is_given_up:
            return 0
        try:
            checksum = self._transfer.poll()
        except Exception:
            self.give_up()
            raise
        if checksum is None and self._transfer.num_idle >= self._patience:
            self._server.ring()
        return checksum

    def give_up(self) -> None:
        self._server.drain()  # what is queued behind a graph that waits would never end
        self._transfer.give_up()
        self._is_given_up = True


class DevicePlaces:
    """`Places` and `Opener`. `plan`: the slots of every expert seat."""

    def __init__(
        self,
        driver: Driver,
        arena_range: ArenaRange,
        plan: ExpertMemoryPlan,
        num_experts: int,
        server: SlotKernels,
        stream: CopyStream,
        files: FileFeeds,
    ) -> None:
        self._driver = driver
        self._range = arena_range
        self._plan = plan
        self._backup_plan = plan.with_slots(num_experts)
        self._server = server
        self._stream = stream
        self._files = files

    def own(self, place: Place) -> int:
        return place.call_index * self._plan.num_slots + place.slot

    def num_bytes(self, call_index: int, expert: int) -> int:
        return self._range.place_bytes

    def hold(self, place: Place, expert: int, at: int) -> None:
        self._server.hold(*place, expert, at)

    def empty(self, place: Place) -> None:
        self._server.empty(*place)

    def fence(self) -> Callable[[], bool]:
        return self._server.fence()

    def drain(self) -> None:
        self._server.drain()

    # -- copies ----------------------------------------------------------------------------------

    def copy(self, at: int, call_index: int, expert: int) -> Callable[[int], Copy]:
        return self.copy_from(self._range.place_address(at))

    def copy_from(self, address: int) -> Callable[[int], Copy]:
        """From an address in a device's memory."""

        def begin(to: int) -> Copy:
            num_bytes = self._range.place_bytes
            if self._range.place_address(to) == address:  # it is used where it is
                return self.begin(NoFeed(num_bytes), to, _STUCK_MAPPED)
            return self.begin(MemoryFeed(address, num_bytes, IN_DEVICE), to)

        return begin

    def in_files(self, call_index: int, expert: int) -> Found[int]:
        feed, checksum = self._files.feed(call_index, expert)
        return Found(Source.FILE, lambda to: self.begin(feed, to), checksum)

    def begin(self, feed: Feed, to: int, patience: int = _STUCK) -> Copy:
        transfer = Transfer(self._stream, feed, self._range.place_address(to), self._range.place_bytes)
        return _Copy(transfer, self._server, patience)

    # -- memory of others ------------------------------------------------------------------------

    def open_seat(self, rank: Rank, weights: MemoryName, fds: Sequence[int]) -> "_Seat":
        weights_fd, table_fd = fds
        with ExitStack() as stack:
            stack.callback(os.close, weights_fd)
            stack.callback(os.close, table_fd)
            table = SlotTable(table_fd, self._plan.num_layers, self._plan.num_slots, read_only=True)
            if weights.gpu == self._driver.device and self._range.has_room(rank, weights.num_bytes):
                self._range.map(rank, weights_fd, weights.num_bytes)
                first = self._range.first_place(rank)
                unmap = lambda: self._range.unmap(rank)  # noqa: E731
                return _Seat(self, table, self._range.place_address(first), unmap, first)
            mapping = Mapping(self._driver, weights_fd, weights.num_bytes)
            return _Seat(self, table, mapping.address, mapping.close)

    def open_backup(self, fds: Sequence[int]) -> "_Backup":
        return _Backup(self, HostBackup(ExpertMemory(self._backup_plan, fds), self._driver))


class _Seat:
    """`OpenSeat`. `first`: its first place; None: kernels do not reach it."""

    def __init__(
        self, places: DevicePlaces, table: SlotTable, address: int, unmap: Callable[[], None], first: int | None = None
    ) -> None:
        self.table = table
        self.is_near = first is not None
        self._places = places
        self._address = address
        self._unmap = unmap
        self._first = first

    def at(self, place: Place) -> int:
        assert self._first is not None, "it is lent where kernels reach it"
        return self._first + self._places.own(place)

    def copy(self, place: Place, expert: int) -> Callable[[int], Copy]:
        num_bytes = self._places.num_bytes(place.call_index, expert)
        return self._places.copy_from(self._address + self._places.own(place) * num_bytes)

    def close(self) -> None:
        self._unmap()
        self.table.close()


class _Backup:
    """`OpenBackup`."""

    def __init__(self, places: DevicePlaces, backup: HostBackup) -> None:
        self.memory = backup.memory
        self.wait = backup.wait
        self.close = backup.close
        self._places = places
        self._backup = backup

    def find(self, call_index: int, expert: int) -> tuple[Place, Entry] | None:
        return self._backup.find(call_index, expert, self._places.num_bytes(call_index, expert))

    def copy(self, place: Place, expert: int) -> Callable[[int], Copy]:
        feed = self._backup.feed(place, self._places.num_bytes(place.call_index, expert))
        return lambda to: self._places.begin(feed, to)
