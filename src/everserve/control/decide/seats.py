"""One seat: its current incarnation, its state, and when the next incarnation may start."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from everserve.control.decide.effects import Tell, ToWorker
from everserve.control.decide.policy import Policy
from everserve.control.decide.processes import Process
from everserve.tables.goal import SeatGoal, Wanted
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.members import Worker, WorkerState
from everserve.tables.slots import Fill, HeldSlots, Place
from everserve.wire.messages import ClearSlots, FillSlots, Leave, StopChanges


@dataclass(frozen=True, kw_only=True)
class Found:
    """A worker process, as a resuming orchestrator finds it. The flags are its own reports and those of the gateway."""

    rank: Rank
    incarnation: Incarnation
    pid: int  # 0: being forked; -1: it has ended, and only its number is known
    roles: tuple[Role, ...] = ()  # empty: those of its seat
    has_reported: bool = False  # or said hello: this orchestrator has got a message from it
    is_ready: bool = False
    is_leaving: bool = False
    was_lost: bool = False  # declared lost to the gateway, which is never revoked
    slots: HeldSlots | None = None


# A seat holds at most one current incarnation. Each arrow to `Empty` ends an incarnation for good: its later messages
# are dropped, though its process may exist for a while (the machine then has it killed).
#
#             provision                  said ready
#     Empty ──────────────> Starting ───────────────> Ready
#      ^  at once, or after    │                        │
#      │  a delay when it      ├───── said leaving ─────┤
#      │  crashes again        │           │            │
#      │  and again            │           v            │
#      │                       │        Leaving         │
#      │                       │           │            │
#      └───────────────────────┴───────────┴────────────┘
#            died, exited, channel ended, said failed, hangs
#
# The end of a leaving worker is expected: no crash, unless it failed, hung or was killed from outside. In the members
# table an empty seat is `gone`.


@dataclass(slots=True)
class Empty:
    """No incarnation counts."""

    STATE: ClassVar[WorkerState] = WorkerState.GONE
    start_at: float | None = None  # when the next one may start; None: not by itself
    delay_s: float = 0.0  # that this is after the end of the last one


@dataclass(slots=True)
class Starting:
    """It is forked and loads. Until its first message a hang cannot be detected, so that has a deadline."""

    STATE: ClassVar[WorkerState] = WorkerState.STARTING
    process: Process
    has_spoken: bool = False
    hello_by: float | None = None  # lost if it has sent nothing then; None: it does not exist yet, or has spoken


@dataclass(slots=True)
class Ready:
    """It serves."""

    STATE: ClassVar[WorkerState] = WorkerState.READY
    process: Process
    ready_at: float
    is_asked_to_leave: bool = False  # by an operator, or because its seat should retire or change, or it is slow


@dataclass(slots=True)
class Leaving:
    """It gives its streams to others, and serves experts that no ready worker holds."""

    STATE: ClassVar[WorkerState] = WorkerState.LEAVING
    process: Process
    ready_at: float | None  # None: it never was
    leave_by: float | None  # when it is killed; None: it was killed


@dataclass(slots=True)
class Absence:
    """Whether others take over what an expert worker holds."""

    heal_at: float | None = None  # while it is not ready: when all that it holds gets other places
    is_replaced: bool = False  # its experts have places elsewhere, besides those that are planned here
    is_overdue: bool = False  # it has been away for so long that nothing waits for it any more


@dataclass(slots=True)
class Seat:
    """What outlives incarnations, and the state of the current one. Times are the computer's monotonic clock."""

    goal: SeatGoal
    now: Empty | Starting | Ready | Leaving = field(default_factory=Empty)
    incarnation: Incarnation = field(default=Incarnation(0))  # the current one, or the last
    left: HeldSlots | None = None  # in the memory of the seat, by an incarnation before
    absence: Absence = field(default_factory=Absence)
    num_crashes: int = 0  # early ends in a row
    num_failed_starts: int = 0  # incarnations in a row that were never ready
    note: str = ""  # for operators
    touched: set[Rank] = field(default_factory=set)  # gets the rank of each seat that may have changed: all share one

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name != "touched":
            self.touch()

    def touch(self) -> None:
        """What is shown of it, or its deadline, may have changed."""
        touched = getattr(self, "touched", None)  # the last field: None while the seat is made
        if touched is not None:
            touched.add(self.goal.rank)

    # -- what it is ------------------------------------------------------------------------------

    @property
    def rank(self) -> Rank:
        return self.goal.rank

    @property
    def id(self) -> WorkerId:
        """The incarnation that the seat holds, or held last."""
        return WorkerId(self.rank, self.incarnation)

    @property
    def state(self) -> WorkerState:
        return self.now.STATE

    @property
    def process(self) -> Process:
        """The process of the incarnation that it holds."""
        assert not isinstance(self.now, Empty), self
        return self.now.process

    @property
    def is_ready(self) -> bool:
        return isinstance(self.now, Ready)

    @property
    def is_retired(self) -> bool:
        """The seat is empty and will not be filled again."""
        return isinstance(self.now, Empty) and self.goal.wanted is Wanted.RETIRE

    @property
    def is_asked_to_leave(self) -> bool:
        return isinstance(self.now, Ready) and self.now.is_asked_to_leave

    @property
    def stays_ready(self) -> bool:
        """Streams may rely on it."""
        return isinstance(self.now, Ready) and not self.now.is_asked_to_leave

    @property
    def comes_back(self) -> bool:
        """It is not ready, or will not be for long; then it or its successor will be, without anything else."""
        return not self.stays_ready and not (isinstance(self.now, Empty) and self.now.start_at is None)

    @property
    def has_spoken(self) -> bool:
        """Its pulse runs, and the detector watches it."""
        return self.now.has_spoken if isinstance(self.now, Starting) else not isinstance(self.now, Empty)

    @property
    def can_serve(self) -> bool:
        """Ready; or leaving, and still able to serve experts that no ready worker holds."""
        return self.is_ready or (isinstance(self.now, Leaving) and self.now.ready_at is not None)

    @property
    def serving_facts(self) -> tuple[object, ...]:
        """All that routes to an expert worker depend on."""
        if isinstance(self.now, Empty):
            return (self.goal.rank,)
        process = self.now.process
        told = process.changes.filling, process.changes.clearing
        return self.goal.rank, type(self.now), self.can_serve, process.is_slow, process.held, told

    @property
    def serves_soon(self) -> bool:
        """It is ready, or has its weights and is about to say so."""
        return self.is_ready or (isinstance(self.now, Starting) and self.held is not None)

    @property
    def is_missed(self) -> bool:
        """It does not serve, and others were not told to take over from it."""
        return not self.can_serve and not self.serves_soon and not self.absence.is_replaced

    @property
    def is_slow(self) -> bool:
        return not isinstance(self.now, Empty) and self.now.process.is_slow

    # -- what it holds ---------------------------------------------------------------------------

    @property
    def held(self) -> HeldSlots | None:
        """What its incarnation reports to hold."""
        return None if isinstance(self.now, Empty) else self.now.process.held

    @property
    def filling(self) -> tuple[Fill, ...]:
        return () if isinstance(self.now, Empty) else self.now.process.changes.filling

    @property
    def is_mapping(self) -> bool:
        """It was told to map experts in the memory of others. A worker does that alone, or copies."""
        if self.held is None or not self.filling:
            return False
        return self.held.is_mapped(Place(self.filling[0].call_index, self.filling[0].slot))

    @property
    def maps(self) -> bool:
        """It is ready, and has slots for experts in the memory of others."""
        return self.is_ready and self.held is not None and self.held.num_mapped > 0

    @property
    def in_memory(self) -> HeldSlots | None:
        """What is in the memory of the seat, as far as that is known. It outlives its workers."""
        return self.held if self.held is not None else self.left

    @property
    def is_awaited(self) -> bool:
        """The next worker will find what is in the memory of the seat, and is expected soon."""
        return self.in_memory is not None and not self.absence.is_overdue

    def forget_memory(self) -> None:
        """It is lost."""
        self.left = None
        if not isinstance(self.now, Empty):
            self.now.process.held = None

    # -- what its worker is told -----------------------------------------------------------------

    def fill(self, fills: tuple[Fill, ...]) -> Tell:
        self.process.changes.tell(fills=fills)
        return self._tell(FillSlots(fills=fills))

    def clear(self, places: tuple[Place, ...]) -> Tell:
        self.process.changes.tell(places=places)
        return self._tell(ClearSlots(places=places))

    def stop(self) -> Tell:
        """What it has not begun is not needed any more, or would fail."""
        self.process.changes.is_stopped = True
        return self._tell(StopChanges())

    def ask_to_leave(self) -> Tell:
        assert isinstance(self.now, Ready), self
        self.now.is_asked_to_leave = True
        return self._tell(Leave())

    def _tell(self, message: ToWorker) -> Tell:
        return Tell(self.rank, self.incarnation, message)

    # -- from state to state ---------------------------------------------------------------------

    def begin(self) -> None:
        """A new incarnation, starting."""
        assert isinstance(self.now, Empty), self
        self.incarnation = Incarnation(self.incarnation + 1)
        self.now = Starting(Process())

    def adopt(self, found: Found, now: float, policy: Policy) -> None:
        """Take over an incarnation that a previous orchestrator has provisioned."""
        assert isinstance(self.now, Empty) and found.pid >= 0, self
        self.incarnation = found.incarnation
        self.now = Starting(Process(held=found.slots))
        if found.pid > 0:
            self.exist(found.pid, now, policy)
        if found.has_reported or found.is_ready or found.is_leaving:
            self.speak()
        if found.is_ready:
            self.become_ready(-math.inf)  # the time is not known: it counts as stable
        if found.is_leaving:
            self.leave(now, policy)

    def exist(self, pid: int, now: float, policy: Policy) -> None:
        """The process exists."""
        if isinstance(self.now, Starting) and self.process.pid == 0 and not self.now.has_spoken:
            self.now.hello_by = now + policy.hello_s
        self.process.pid = pid

    def speak(self) -> None:
        """It has sent a message: its pulse runs, and the detector watches it."""
        if isinstance(self.now, Starting):
            self.now.has_spoken, self.now.hello_by = True, None

    def become_ready(self, now: float) -> None:
        self.now = Ready(self.process, now)
        self.num_failed_starts = 0
        self.absence.heal_at, self.absence.is_overdue = None, False
        self.note = ""

    def leave(self, now: float, policy: Policy) -> None:
        ready_at = self.now.ready_at if isinstance(self.now, Ready) else None
        self.now = Leaving(self.process, ready_at, now + policy.leave_s)
        self.note = ""

    def end(self, reason: str, now: float, policy: Policy, has_left: bool = False, is_chance: bool = False) -> None:
        """The incarnation is gone. `is_chance`: a start that says nothing of the next one."""
        assert not isinstance(self.now, Empty), self
        ready_at = None if isinstance(self.now, Starting) else self.now.ready_at
        if ready_at is not None and now - ready_at >= policy.stable_s:
            self.num_crashes = 0
        elif not has_left and not is_chance:
            self.num_crashes += 1
        self.num_failed_starts += ready_at is None and not has_left
        self.note = self._last_words(reason, ready_at is not None, has_left)
        self.left = self.in_memory
        self.now = Empty()

    def _last_words(self, reason: str, was_ready: bool, has_left: bool) -> str:
        if has_left:
            return f"incarnation {self.incarnation} left"
        if self.num_crashes < 2:
            return f"incarnation {self.incarnation} was lost: {reason}"
        when = "soon after starting" if was_ready else "while starting"
        return f"crashed {self.num_crashes} times {when} (last: {reason})"

    def wait(self, delay_s: float, now: float) -> None:
        """The next incarnation may start after this delay."""
        self.now = Empty(start_at=now + delay_s, delay_s=delay_s)

    def leave_empty(self, why: str) -> None:
        """There will be no next incarnation."""
        assert isinstance(self.now, Empty), self
        self.now = Empty()
        self.note = f"not started again: {why}"

    # -- what is due, and what is shown ----------------------------------------------------------

    def next_deadline(self) -> float | None:
        deadlines = [self.absence.heal_at]
        match self.now:
            case Empty(start_at=at) | Starting(hello_by=at) | Leaving(leave_by=at):
                deadlines.append(at)
        if not isinstance(self.now, Empty):
            deadlines += [self.process.look_at(), self.process.changes.again_at]
        return min((at for at in deadlines if at is not None), default=None)

    def worker(self, slots: int, shadow_slots: int) -> Worker:
        """The seat as the members table shows it."""
        note = self.note
        if isinstance(self.now, Empty) and self.now.start_at is not None:
            note = f"{note}; next start in {self.now.delay_s:g} s"
        if self.goal.wanted is not Wanted.STAY and isinstance(self.now, Starting | Ready):
            becomes = "retires" if self.goal.wanted is Wanted.RETIRE else f"becomes an {self.goal.next_role} worker"
            note = f"{becomes}: leaves when other workers have taken over its work"
        return Worker(
            rank=self.rank,
            incarnation=self.incarnation,
            pid=0 if isinstance(self.now, Empty) else self.now.process.pid,
            roles=self.goal.roles,
            state=self.state,
            host=self.goal.host,
            device=self.goal.device,
            slots=slots,
            shadow_slots=shadow_slots,
            is_slow=self.is_slow,
            note=note,
        )
