"""The slots of an expert worker that holds its experts in memory of its seat, as its orchestrator changes them, while
it serves.

    begin   the slot is empty: who asks for its old expert is refused
    poll    ... until nothing reads the slot that began before, and no other process has it locked
            ... until the first source that works has filled the slot, and its checksum is right
            the seat's table, for the next incarnation -> ops read the slot from now on

Nothing here waits. Sources, cheapest first: another slot of this worker, the memory of a peer, the backup, the model's
files. Each is looked at when it is its turn, not before; one that has changed or is damaged falls through to the next.

The last slots of each layer, behind those of the seat's memory, are for experts in the memory of another seat that ops
reach, and whose worker does not serve: ops compute with them there, nothing is copied, and only their checksum is
computed once. Such a loan ends when the slot is cleared or filled again, or the memory is withdrawn, and nothing that
may read it runs any more: until then no process can change what is lent.

The memory outlives this process: its successor starts with what the table says is there.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol

from everserve.memory.weights.found import At, Copy, Found, Loan
from everserve.memory.weights.offers import Offers
from everserve.memory.weights.slot_table import Entry, NotOwnerError, SlotTable
from everserve.tables.ids import Rank
from everserve.tables.memory import MemoryName
from everserve.tables.slots import EMPTY, FailedFill, Fill, Filled, HeldSlots, Place, Source

log = logging.getLogger(__name__)

_LOCK_S = 30.0  # how long a fill waits for a process that was stopped while it filled the same slot, and will be killed


class Places(Protocol[At]):
    """The memory of this seat, and what computes with it: backends."""

    def own(self, place: Place) -> At: ...

    def num_bytes(self, call_index: int, expert: int) -> int: ...

    def copy(self, at: At, call_index: int, expert: int) -> Callable[[At], Copy]:
        """From a place that this worker computes with."""

    def in_files(self, call_index: int, expert: int) -> Found[At]:
        """Its copy raises if the files are not those that this instance serves."""

    def hold(self, place: Place, expert: int, at: At) -> None:
        """Who asks for this expert in this slot gets it from now on."""

    def empty(self, place: Place) -> None: ...

    def fence(self) -> Callable[[], bool]:
        """Whether everything has ended that may read what was just emptied."""

    def drain(self) -> None:
        """Return when it has: memory goes away."""


@dataclass(frozen=True)
class _Held(Generic[At]):
    expert: int
    checksum: int
    at: At
    lender: Rank | None = None
    loan: Loan | None = None


@dataclass
class _Running(Generic[At]):
    """A fill. It has the lock of its slot, if the slot is the seat's own."""

    fill: Fill
    sources: Iterator[Found[At]]
    began_s: float = field(default_factory=time.monotonic)
    is_locked: bool = False
    found: Found[At] | None = None
    loan: Loan | None = None
    copy: Copy | None = None
    is_withdrawn: bool = False  # what it is copied from
    reasons: list[str] = field(default_factory=list)

    @property
    def place(self) -> Place:
        return Place(self.fill.call_index, self.fill.slot)

    def end_loan(self) -> None:
        if self.loan is not None:
            self.loan.end()
            self.loan = None


class MemorySlots(Generic[At]):
    """`table`: of the seat's own slots. `num_slots`, `num_own`: of each layer, with those for what is lent and without.
    `num_experts`: that each layer has. All slots are empty at first."""

    def __init__(
        self,
        table: SlotTable,
        num_slots: Sequence[int],
        num_own: Sequence[int],
        num_experts: Sequence[int],
        places: Places[At],
        offers: Offers[At],
    ) -> None:
        assert all(own <= num for own, num in zip(num_own, num_slots, strict=True)), (num_own, num_slots)
        self._table = table
        self._num_own = num_own
        self._num_experts = num_experts
        self._num_mapped = num_slots[0] - num_own[0]
        self._places = places
        self._offers = offers
        self._held: list[list[_Held[At] | None]] = [[None] * num for num in num_slots]
        self._generations = [[0] * num for num in num_slots]
        self._fences: dict[Place, Callable[[], bool]] = {}  # of slots that were emptied
        self._ending: list[tuple[Callable[[], bool], Rank | None, Loan]] = []  # loans, of slots that were emptied
        self._running: _Running[At] | None = None

    def num_experts(self, call_index: int) -> int:
        return self._num_experts[call_index]

    @property
    def held(self) -> HeldSlots:
        experts = tuple(tuple(EMPTY if held is None else held.expert for held in slots) for slots in self._held)
        return HeldSlots(experts=experts, generations=tuple(map(tuple, self._generations)), num_mapped=self._num_mapped)

    def take_over(self) -> None:
        """What a predecessor has left, and the table says is there: ops compute with it already."""
        for place in self._table.places():
            if (entry := self._table.read(place)) is not None:
                self.note(place, entry)

    def note(self, place: Place, entry: Entry) -> None:
        """The slot holds this: one of those that a predecessor has left."""
        self._note(place, _Held(entry.expert, entry.checksum, self._places.own(place)))

    # -- fills -----------------------------------------------------------------------------------

    def begin(self, fill: Fill) -> None:
        assert self._running is None, "one fill at a time"
        self._running = _Running(fill, self._sources(fill))
        self._empty(self._running.place)

    def poll(self) -> Filled | FailedFill | None:
        running = self._running
        if running is None:
            return None
        try:
            result = self._advance(running)
        except Exception as error:
            if not isinstance(error, NotOwnerError | TimeoutError):  # which say all: the memory is another process's
                log.exception("expert %d cannot be loaded", running.fill.expert)
            result = FailedFill(**running.fill._asdict(), reason=_described(error))
            running.end_loan()
        if result is not None:
            if running.is_locked:
                self._table.end(running.place)
            self._running = None
        return result

    def _advance(self, running: _Running[At]) -> Filled | FailedFill | None:
        if not self._may_write(running):
            return None
        if running.copy is None and not self._begin_copy(running):
            reasons = "; ".join(running.reasons) or "no memory of another seat that ops reach has it"
            return FailedFill(**running.fill._asdict(), reason=reasons)
        assert running.copy is not None and running.found is not None
        try:
            checksum = running.copy.poll()
        except Exception as error:  # e.g. a file that is gone
            self._fall_through(running, _described(error))
            return None
        if checksum is None:
            return None
        if running.is_withdrawn:
            self._fall_through(running, "it was withdrawn")
            return None
        expected = running.found.checksum()
        if not running.found.is_unchanged() or (expected is not None and checksum != expected):
            self._fall_through(running, "the checksum is wrong")
            return None
        return self._hold(running, running.found, checksum)

    def _may_write(self, running: _Running[At]) -> bool:
        """Nothing may read the slot any more, and no process that was declared gone may write to it."""
        place = running.place
        fence = self._fences.get(place)
        if fence is not None:
            if not fence():
                return False
            del self._fences[place]
        if not running.is_locked and self._is_own(place):
            running.is_locked = self._table.begin(place)
            if not running.is_locked and time.monotonic() > running.began_s + _LOCK_S:
                raise TimeoutError(
                    "an older process of this seat may still write to the slot, or another worker reads it"
                )
            return running.is_locked
        return True

    def _begin_copy(self, running: _Running[At]) -> bool:
        """From the next source that has the expert; False if there is none."""
        found = next((one for one in running.sources if one.loan is None or one.loan.take()), None)
        if found is None:
            return False
        running.found, running.loan, running.is_withdrawn = found, found.loan, False
        running.copy = found.begin(self._places.own(running.place) if found.at is None else found.at)
        return True

    def _fall_through(self, running: _Running[At], reason: str) -> None:
        """To the next source. Nothing is copied any more."""
        assert running.found is not None
        running.copy = None
        running.end_loan()
        running.reasons.append(f"{running.found.source}: {reason}")

    def _hold(self, running: _Running[At], found: Found[At], checksum: int) -> Filled:
        place, expert = running.place, running.fill.expert
        if found.at is None:
            self._table.complete(place, expert, checksum)
            held = _Held(expert, checksum, self._places.own(place))
        else:
            held = _Held(expert, checksum, found.at, found.rank, running.loan)
        self._places.hold(place, expert, held.at)
        self._note(place, held)
        running.loan = None
        num_bytes = self._places.num_bytes(place.call_index, expert) if found.at is None else 0
        took_s = time.monotonic() - running.began_s
        return Filled(fill=running.fill, source=found.source, num_bytes=num_bytes, seconds=took_s)

    def _sources(self, fill: Fill) -> Iterator[Found[At]]:
        """The cheapest first."""
        index, slot, expert = fill
        if not self._is_own(Place(index, slot)):
            yield from self._offers.lent(index, expert)
            return
        for held in [other for i, other in enumerate(self._held[index]) if other is not None and i != slot]:
            if held.expert == expert and held in self._held[index]:  # an earlier source may have taken a while
                yield self._in_slot(index, held)
        yield from self._offers.elsewhere(index, expert)
        yield self._places.in_files(index, expert)

    def _in_slot(self, call_index: int, held: _Held[At]) -> Found[At]:
        return Found(
            Source.SLOT if held.lender is None else Source.PEER,
            self._places.copy(held.at, call_index, held.expert),
            checksum=lambda: held.checksum,
            is_unchanged=lambda: held in self._held[call_index],
            rank=held.lender,
        )

    # -- other changes ---------------------------------------------------------------------------

    def clear(self, place: Place) -> None:
        self._empty(place)
        if self._is_own(place):
            try:
                self._table.clear(place)
            except NotOwnerError as error:
                log.warning("a slot was cleared in this process only: %s", error)

    def offer(self, rank: Rank | None, weights: MemoryName, fds: Sequence[int]) -> None:
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
            self._give_up(Source.HOST, None)
            self._places.drain()
            self._offers.remove_backup()
            return
        for call_index, slots in enumerate(self._held):
            for slot, held in enumerate(slots):
                if held is not None and held.lender == rank:
                    self.clear(Place(call_index, slot))
        self._give_up(None, rank)
        self._places.drain()  # memory goes away, which nothing that runs may notice
        self._end_loans(rank)
        self._offers.remove(rank)

    def tend(self) -> None:
        if self._ending:
            self._end_loans(None)

    def _end_loans(self, rank: Rank | None) -> None:
        """Ends the loans of slots that nothing reads any more; all of this rank."""
        left: list[tuple[Callable[[], bool], Rank | None, Loan]] = []
        for is_over, lender, loan in self._ending:  # the oldest first: before it is over no other is
            if (rank is not None and lender == rank) or (not left and is_over()):
                loan.end()
            else:
                left.append((is_over, lender, loan))
        self._ending = left

    def _give_up(self, source: Source | None, rank: Rank | None) -> None:
        """A source goes away, which a fill may use just now."""
        running = self._running
        if running is None or running.copy is None or running.found is None:
            return
        if running.found.source is source or (rank is not None and running.found.rank == rank):
            running.is_withdrawn = True
            running.copy.give_up()
            running.end_loan()

    def _empty(self, place: Place) -> None:
        held = self._held[place.call_index][place.slot]
        if held is None:
            return
        self._held[place.call_index][place.slot] = None
        self._generations[place.call_index][place.slot] += 1
        self._places.empty(place)
        self._fences[place] = fence = self._places.fence()
        if held.loan is not None:
            self._ending.append((fence, held.lender, held.loan))
            self._end_loans(None)

    def _note(self, place: Place, held: _Held[At]) -> None:
        self._held[place.call_index][place.slot] = held
        self._generations[place.call_index][place.slot] += 1

    def _is_own(self, place: Place) -> bool:
        return place.slot < self._num_own[place.call_index]


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
