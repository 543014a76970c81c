"""The slots of an expert worker on a GPU, as its orchestrator changes them, while it serves.

    begin   the slot is empty: kernels answer *moved*
    poll    ... until all graphs have ended that began before
            ... until the first source that works has filled the slot, and its checksum is right
            the seat's table, for the next incarnation -> the place -> the expert, which lets kernels use it

Nothing here waits. A worker that still asks for the old expert is refused; live attention workers do not ask, since a
slot is only refilled when they have all acknowledged routes that do not lead to it.

The last slots of a layer, from `num_own` on, have no memory of this seat. They are for experts in the memory of another
seat on the same device, whose worker does not serve: kernels compute with them there, nothing is copied, and only their
checksum is computed once. Such a loan ends when the slot is cleared or filled again, or the memory is withdrawn, and no
graph that may read it runs any more: until then no process can change what is lent.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from everserve.backends.cuda.offers import Found, Loan
from everserve.backends.cuda.transfer import IN_DEVICE, CopyStream, Feed, MemoryFeed, Transfer
from everserve.memory.weights.slot_table import NotOwnerError, SlotTable
from everserve.tables.ids import Rank
from everserve.tables.memory import Memory
from everserve.tables.slots import EMPTY, FailedFill, Fill, Filled, HeldSlots, Place, Source

log = logging.getLogger(__name__)

# Polls without progress. A device has fewer queues than a process has streams: a copy may be queued behind a graph that
# waits for its bell, and gets its turn when the graphs before it have ended. Streams wait for what is not copied.
_STUCK, _STUCK_MAPPED = 10, 2
_LOCK_S = 30.0  # how long a fill waits for a process that was stopped while it filled the same slot, and will be killed


class FileFeeds(Protocol):
    """The experts in the model's files."""

    def feed(self, layer_index: int, expert: int) -> tuple[Feed, Callable[[], int | None]]:
        """And its checksum, known at the end. Raises if the files are not those that this instance serves."""


class SlotKernels(Protocol):
    """What is needed of `CudaServer`."""

    def empty(self, layer_index: int, slot: int) -> None: ...
    def fence(self) -> Callable[[], bool]: ...
    def ring(self) -> None: ...
    def hold(self, layer_index: int, slot: int, expert: int, place: int) -> None: ...
    def drain(self) -> None: ...


class Addresses(Protocol):
    """What is needed of `ArenaRange`."""

    place_bytes: int

    def place_address(self, place: int) -> int: ...


class OfferedMemory(Protocol):
    """What is needed of `Offers`."""

    def has(self, rank: Rank, weights: Memory) -> bool: ...
    def add(self, rank: Rank, weights: Memory, fds: Sequence[int]) -> None: ...
    def remove(self, rank: Rank) -> None: ...
    def add_backup(self, weights: Memory, fds: Sequence[int]) -> None: ...
    def remove_backup(self) -> None: ...
    def lent(self, layer_index: int, expert: int) -> Iterator[Found]: ...
    def elsewhere(self, layer_index: int, expert: int) -> Iterator[Found]: ...


@dataclass(frozen=True)
class _Held:
    expert: int
    checksum: int
    place: int  # in the range
    lender: Rank | None = None
    loan: Loan | None = None


@dataclass
class _Running:
    """A fill. It has the lock of its slot, if the slot is the seat's own."""

    fill: Fill
    sources: Iterator[Found]
    began_s: float = field(default_factory=time.monotonic)
    is_locked: bool = False
    found: Found | None = None
    transfer: Transfer | None = None
    reasons: list[str] = field(default_factory=list)

    @property
    def at(self) -> Place:
        return Place(self.fill.layer_index, self.fill.slot)


class CudaSlots:
    """`table`: of the seat's own slots. `held`: what they hold at first, with the checksums."""

    def __init__(
        self,
        table: SlotTable,
        num_slots: int,
        num_experts: int,
        addresses: Addresses,
        server: SlotKernels,
        stream: CopyStream,
        offers: OfferedMemory,
        files: FileFeeds,
    ) -> None:
        assert num_slots >= table.num_slots
        self._num_experts = num_experts
        self._table = table
        self._num_own = table.num_slots
        self._addresses = addresses
        self._server = server
        self._stream = stream
        self._offers = offers
        self._files = files
        self._held: list[list[_Held | None]] = [[None] * num_slots for _ in range(table.num_layers)]
        self._generations = [[0] * num_slots for _ in range(table.num_layers)]
        self._fences: dict[Place, Callable[[], bool]] = {}  # of slots that were emptied
        self._ending: list[tuple[Callable[[], bool], Rank | None, Loan]] = []  # loans, of slots that were emptied
        self._running: _Running | None = None
        for at in table.places():
            if (entry := table.read(at)) is not None:
                self._note(at, _Held(entry.expert, entry.checksum, self._own_place(at)))

    def num_experts(self, layer_index: int) -> int:
        return self._num_experts

    @property
    def held(self) -> HeldSlots:
        experts = tuple(tuple(EMPTY if held is None else held.expert for held in slots) for slots in self._held)
        num_mapped = len(self._held[0]) - self._num_own
        return HeldSlots(experts=experts, generations=tuple(map(tuple, self._generations)), num_mapped=num_mapped)

    # -- fills -----------------------------------------------------------------------------------

    def begin(self, fill: Fill) -> None:
        assert self._running is None, "one fill at a time"
        self._running = _Running(fill, self._sources(fill))
        self._empty(self._running.at)

    def poll(self) -> Filled | FailedFill | None:
        running = self._running
        if running is None:
            return None
        try:
            result = self._advance(running)
        except Exception as error:  # e.g. another incarnation has the memory by now
            log.exception("expert %d cannot be loaded", running.fill.expert)
            result = self._failed(running, _described(error))
        if result is not None:
            self._end(running)
        return result

    def _advance(self, running: _Running) -> Filled | FailedFill | None:
        if not self._may_write(running):
            return None
        if running.transfer is None and not self._begin_transfer(running):
            reasons = "; ".join(running.reasons) or "no memory of another seat on this device has it"
            return self._failed(running, reasons)
        assert running.transfer is not None and running.found is not None
        try:
            checksum = running.transfer.poll()
        except Exception as error:  # e.g. a file that is gone
            self._give_up_source(running, _described(error))
            return None
        if checksum is None:
            if running.transfer.num_idle >= (_STUCK if running.found.place is None else _STUCK_MAPPED):
                self._server.ring()
            return None
        running.transfer = None
        expected = running.found.checksum()
        if not running.found.is_unchanged() or (expected is not None and checksum != expected):
            running.reasons.append(f"{running.found.source}: the checksum is wrong")
            self._give_back(running.found)
            return None
        return self._hold(running, running.found, checksum)

    def _may_write(self, running: _Running) -> bool:
        """No graph may read the slot any more, and no process that was declared gone may write to it."""
        fence = self._fences.get(running.at)
        if fence is not None:
            if not fence():
                return False
            del self._fences[running.at]
        if not running.is_locked and running.fill.slot < self._num_own:
            running.is_locked = self._table.begin(running.at)
            if not running.is_locked and time.monotonic() > running.began_s + _LOCK_S:
                raise TimeoutError(
                    "an older process of this seat may still write to the slot, or another worker reads it"
                )
            return running.is_locked
        return True

    def _begin_transfer(self, running: _Running) -> bool:
        """From the next source that has the expert; False if there is none. Sources are looked at when it is their
        turn, not before."""
        found = next((one for one in running.sources if one.loan is None or one.loan.take()), None)
        if found is None:
            return False
        place = self._own_place(running.at) if found.place is None else found.place
        running.found = found
        running.transfer = Transfer(
            self._stream, found.feed, self._addresses.place_address(place), self._addresses.place_bytes
        )
        return True

    def _give_up_source(self, running: _Running, reason: str) -> None:
        assert running.transfer is not None and running.found is not None
        self._server.drain()  # what is queued behind a graph that waits would never end
        running.transfer.give_up()
        running.transfer = None
        self._give_back(running.found)
        running.reasons.append(f"{running.found.source}: {reason}")

    def _give_back(self, found: Found) -> None:
        """It was borrowed for a fill that did not work."""
        if found.loan is not None:
            found.loan.end()

    def _hold(self, running: _Running, found: Found, checksum: int) -> Filled:
        at, expert = running.at, running.fill.expert
        if found.place is None:
            self._table.complete(at, expert, checksum)
            held = _Held(expert, checksum, self._own_place(at))
        else:
            held = _Held(expert, checksum, found.place, found.rank, found.loan)
        self._server.hold(*at, expert, held.place)
        self._note(at, held)
        num_bytes = self._addresses.place_bytes if found.place is None else 0
        took_s = time.monotonic() - running.began_s
        return Filled(fill=running.fill, source=found.source, num_bytes=num_bytes, seconds=took_s)

    def _failed(self, running: _Running, reason: str) -> FailedFill:
        if running.transfer is not None:
            self._give_up_source(running, reason)
        return FailedFill(**running.fill._asdict(), reason=reason)

    def _end(self, running: _Running) -> None:
        if running.is_locked:
            self._table.end(running.at)
        self._running = None

    def _sources(self, fill: Fill) -> Iterator[Found]:
        """The cheapest first."""
        index, slot, expert = fill
        if slot >= self._num_own:
            yield from self._offers.lent(index, expert)
            return
        for held in [other for i, other in enumerate(self._held[index]) if other is not None and i != slot]:
            if held.expert == expert and held in self._held[index]:  # an earlier source may have taken a while
                yield self._in_slot(index, held)
        yield from self._offers.elsewhere(index, expert)
        feed, checksum = self._files.feed(index, expert)
        yield Found(Source.FILE, feed, checksum, is_unchanged=lambda: True)

    def _in_slot(self, layer_index: int, held: _Held) -> Found:
        feed = MemoryFeed(self._addresses.place_address(held.place), self._addresses.place_bytes, IN_DEVICE)
        return Found(
            Source.SLOT,
            feed,
            checksum=lambda: held.checksum,
            is_unchanged=lambda: held in self._held[layer_index],
            rank=held.lender,
        )

    # -- other changes ---------------------------------------------------------------------------

    def clear(self, place: Place) -> None:
        self._empty(place)
        if place.slot < self._num_own:
            try:
                self._table.clear(place)
            except NotOwnerError as error:
                log.warning("a slot was cleared in this process only: %s", error)

    def offer(self, rank: Rank | None, weights: Memory, fds: Sequence[int]) -> None:
        """An orchestrator that is new offers again what is offered: it stays as it is, since it may be lent."""
        if rank is None:
            self.withdraw(None)
            self._offers.add_backup(weights, fds)
        elif self._offers.has(rank, weights):
            for fd in fds:
                os.close(fd)
        else:
            self.withdraw(rank)
            self._offers.add(rank, weights, fds)

    def withdraw(self, rank: Rank | None) -> None:
        if rank is None:
            self._let_go(Source.HOST, None)
            self._server.drain()
            self._offers.remove_backup()
            return
        for layer_index, slots in enumerate(self._held):
            for slot, held in enumerate(slots):
                if held is not None and held.lender == rank:
                    self.clear(Place(layer_index, slot))
        self._let_go(None, rank)
        self._server.drain()  # memory is unmapped, which no graph may notice
        self._end_loans(rank)
        self._offers.remove(rank)

    def tend(self) -> None:
        if self._ending:
            self._end_loans(None)

    def _end_loans(self, rank: Rank | None) -> None:
        """Of slots that no graph reads any more; all of this rank."""
        left: list[tuple[Callable[[], bool], Rank | None, Loan]] = []
        for is_over, lender, loan in self._ending:  # in the order of graphs: behind one that runs all others do
            if (rank is not None and lender == rank) or (not left and is_over()):
                loan.end()
            else:
                left.append((is_over, lender, loan))
        self._ending = left

    def _let_go(self, source: Source | None, rank: Rank | None) -> None:
        """Of a source that goes away, if a fill uses it just now."""
        running = self._running
        if running is None or running.transfer is None or running.found is None:
            return
        if running.found.source is source or (rank is not None and running.found.rank == rank):
            self._give_up_source(running, "it was withdrawn")

    def _empty(self, at: Place) -> None:
        held = self._held[at.layer_index][at.slot]
        if held is None:
            return
        self._held[at.layer_index][at.slot] = None
        self._generations[at.layer_index][at.slot] += 1
        self._server.empty(*at)
        self._fences[at] = fence = self._server.fence()
        if held.loan is not None:
            self._ending.append((fence, held.lender, held.loan))

    def _note(self, at: Place, held: _Held) -> None:
        self._held[at.layer_index][at.slot] = held
        self._generations[at.layer_index][at.slot] += 1

    def _own_place(self, at: Place) -> int:
        return at.layer_index * self._num_own + at.slot


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
