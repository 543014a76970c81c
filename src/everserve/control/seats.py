"""One seat: who sits there, how it got there, and when the next one may come."""

import math
from dataclasses import dataclass, field

from everserve.tables.goal import SeatGoal, Wanted
from everserve.tables.ids import Epoch, Incarnation, Rank, WorkerId
from everserve.tables.members import Worker, WorkerState
from everserve.tables.slots import HeldSlots


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The times that belong together: detect_s < starved_s = 10 detect_s < unserved_s = 200 detect_s (for one suspicion
    a peer on a device takes 20 detect_s), and first_delay_s <= max_delay_s."""

    detect_s: float  # how long the host's detector takes to call somebody silent
    hello_s: float = 10.0  # from the existence of a process to its first word; until then nobody can tell that it hangs
    fence_grace_s: float = 10.0  # how long a lost process may take to notice, before it is killed
    leave_s: float = 30.0  # how long a worker that leaves may take, before it is killed
    stable_s: float = 2.0  # who ends sooner than this after it was ready counts as a crash while starting
    first_delay_s: float = 0.25  # after the second such end in a row; doubled with each further one
    max_delay_s: float = 30.0
    max_failed_starts: int = 5  # in a row, in one seat, until the instance gives up (if it was never all ready)
    max_unserved: int = 3  # by one peer, within unserved_s: who pulses and does not serve so often is lost

    def __post_init__(self) -> None:
        assert self.detect_s > 0 and 0 < self.first_delay_s <= self.max_delay_s, self

    @property
    def starved_s(self) -> float:
        """How long a process that is not stopped may be silent: it may only be short of a core, or its core of time."""
        return 10 * self.detect_s

    @property
    def unserved_s(self) -> float:
        """How long it counts against a worker that it did not serve a peer. Who does not serve at all is asked again as
        soon as it is pardoned; one that had a bad moment now and then stays."""
        return 200 * self.detect_s

    def delay_s(self, num_crashes: int) -> float:
        """How long the seat waits after this many short lives in a row: 0, 0, 0.25, 0.5, 1, ... seconds."""
        if num_crashes < 2:
            return 0.0
        doublings = min(num_crashes - 2, 60)
        return min(self.first_delay_s * float(2**doublings), self.max_delay_s)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A worker process, as an orchestrator that resumes finds it. The flags are what it said, and what others say."""

    rank: Rank
    incarnation: Incarnation
    pid: int  # 0: about to be born; -1: it has ended, and only its number counts
    has_reported: bool = False  # or said hello: it has spoken to this orchestrator
    is_ready: bool = False
    is_leaving: bool = False
    was_lost: bool = False  # the gateway was told that it is gone, which is never taken back
    slots: HeldSlots | None = None


# A seat holds at most one incarnation that counts. Each arrow to `gone` ends an incarnation for good: what it says
# afterwards is dropped, though its process may live on for a while (the machine then has it killed).
#
#             provision                  said ready
#     gone ───────────────> starting ───────────────> ready
#      ^  at once, or after    │                        │
#      │  a delay when it      ├───── said leaving ─────┤
#      │  crashes again        │           │            │
#      │  and again            │           v            │
#      │                       │        leaving         │
#      │                       │           │            │
#      └───────────────────────┴───────────┴────────────┘
#            died, exited, channel ended, said failed, hangs
#
# The end of one that was leaving is what everybody waits for: no crash, unless it failed, hung or was killed by others.
# Until its end it may be in doubt: silent, or reported by a peer. Doubt is not a state of the tables.
@dataclass(slots=True)
class Seat:
    """The state of one seat. Times are the host's monotonic clock."""

    goal: SeatGoal
    slots: int = 0  # per layer
    shadow_slots: int = 0
    held: HeldSlots | None = None  # what the incarnation reports to hold
    acknowledged: Epoch = field(default=Epoch(0))  # of the routes that an attention worker says it uses
    state: WorkerState = WorkerState.GONE
    incarnation: Incarnation = field(default=Incarnation(0))
    pid: int = 0
    note: str = ""
    delay_s: float = 0.0
    start_at: float | None = None  # while gone: when the next incarnation may come; None: not at all
    ready_at: float | None = None  # None: it never was
    leave_by: float | None = None  # while leaving: killed if it has not ended at this time; None: that has happened
    num_crashes: int = 0  # short lives in a row
    num_failed_starts: int = 0  # incarnations in a row that were never ready
    has_spoken: bool = False
    hello_by: float | None = None  # it exists and has not said a word: lost if still so at this time
    starve_at: float | None = None  # silent but not stopped: lost if still so at this time
    is_probed: bool = False  # the host has been asked to look and has not answered yet
    is_reported: bool = False  # a peer routes around it
    unserved_at: dict[Rank, list[float]] = field(default_factory=dict)  # when it did not serve which peer

    @property
    def rank(self) -> Rank:
        return self.goal.rank

    @property
    def id(self) -> WorkerId:
        """The incarnation that the seat holds, or held last."""
        return WorkerId(self.rank, self.incarnation)

    @property
    def is_retired(self) -> bool:
        """It is empty, and stays so."""
        return self.state is WorkerState.GONE and self.goal.wanted is Wanted.RETIRE

    @property
    def can_serve(self) -> bool:
        """Ready; or leaving, and still there for whoever has nobody else."""
        return self.state is WorkerState.READY or (self.state is WorkerState.LEAVING and self.ready_at is not None)

    def begin(self) -> None:
        """A new incarnation, starting."""
        assert self.state is WorkerState.GONE, self
        self.state = WorkerState.STARTING
        self.incarnation = Incarnation(self.incarnation + 1)
        self.pid = 0
        self.held, self.acknowledged = None, Epoch(0)
        self.has_spoken = False
        self.start_at = self.ready_at = None
        self.unserved_at = {}
        self.clear_doubt()

    def adopt(self, found: Found, now: float, policy: Policy) -> None:
        """An orchestrator before us has begun this incarnation."""
        assert self.state is WorkerState.GONE and found.pid >= 0, self
        self.state = WorkerState.STARTING
        self.incarnation = found.incarnation
        if found.pid > 0:
            self.exist(found.pid, now, policy)
        if found.has_reported or found.is_ready or found.is_leaving:
            self.speak()
        self.held = found.slots
        if found.is_ready:
            self.become_ready(-math.inf)  # nobody knows since when: it counts as a stable life
        if found.is_leaving:
            self.leave(now, policy)

    def exist(self, pid: int, now: float, policy: Policy) -> None:
        """The process is there. Until its hello nobody could tell if it hung, so that has a deadline of its own."""
        if self.pid == 0 and not self.has_spoken:
            self.hello_by = now + policy.hello_s
        self.pid = pid

    def speak(self) -> None:
        """Its pulse goes; the detector watches it."""
        self.has_spoken = True
        self.hello_by = None

    def become_ready(self, now: float) -> None:
        self.state = WorkerState.READY
        self.ready_at = now
        self.num_failed_starts = 0
        self.note = ""

    def leave(self, now: float, policy: Policy) -> None:
        self.state = WorkerState.LEAVING
        self.leave_by = now + policy.leave_s
        self.note = ""

    def end(self, reason: str, now: float, policy: Policy, has_left: bool = False) -> None:
        """The incarnation is gone."""
        assert self.state is not WorkerState.GONE, self
        if self.ready_at is not None and now - self.ready_at >= policy.stable_s:
            self.num_crashes = 0
        elif not has_left:
            self.num_crashes += 1
        if has_left:
            self.note = f"incarnation {self.incarnation} left"
        elif self.num_crashes < 2:
            self.note = f"incarnation {self.incarnation} was lost: {reason}"
        else:
            when = "while starting" if self.ready_at is None else "soon after starting"
            self.note = f"crashed {self.num_crashes} times {when} (last: {reason})"
        self.num_failed_starts += self.ready_at is None and not has_left
        self.state = WorkerState.GONE
        self.pid = 0
        self.hello_by = self.leave_by = None
        self.clear_doubt()

    def wait(self, delay_s: float, now: float) -> None:
        """The next incarnation may come after this delay."""
        self.delay_s = delay_s
        self.start_at = now + delay_s

    def leave_empty(self, why: str) -> None:
        """No next incarnation."""
        self.start_at = None
        self.note = f"not started again: {why}"

    def did_not_serve(self, peer: Rank, now: float, policy: Policy) -> int:
        """A peer says so. Returns how often it has lately; each time it had trusted it again before."""
        lately = [at for at in self.unserved_at.get(peer, []) if now - at < policy.unserved_s]
        self.unserved_at[peer] = [*lately, now]
        return len(lately) + 1

    def clear_doubt(self) -> None:
        self.starve_at = None
        self.is_probed = self.is_reported = False

    def next_deadline(self) -> float | None:
        """While a probe is on its way its answer decides, not the clock."""
        if self.state is WorkerState.GONE:
            return self.start_at
        look_at = None if self.is_probed else self.starve_at
        return min((at for at in (self.hello_by, look_at, self.leave_by) if at is not None), default=None)

    def worker(self) -> Worker:
        """The seat as the members table shows it."""
        return Worker(
            rank=self.rank,
            incarnation=self.incarnation,
            pid=self.pid,
            roles=self.goal.roles,
            state=self.state,
            host=self.goal.host,
            device=self.goal.device,
            slots=self.slots,
            shadow_slots=self.shadow_slots,
            note=self.note if self.start_at is None else f"{self.note}; next start in {self.delay_s:g} s",
        )
