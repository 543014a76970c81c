"""One seat: its current incarnation, its state, and when the next incarnation may start."""

import math
from dataclasses import dataclass, field

from everserve.control.effects import ClearSlots, FillSlots, StopChanges
from everserve.control.slowness import SlowPolicy
from everserve.tables.goal import SeatGoal, Wanted
from everserve.tables.ids import Epoch, Incarnation, Rank, Role, WorkerId
from everserve.tables.members import Worker, WorkerState
from everserve.tables.slots import Fill, HeldSlots, Place


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The timeouts, which depend on each other: detect_s < starved_s = 10 detect_s < unserved_s = 200 detect_s (for one
    suspicion a peer on a device takes 20 detect_s), and first_delay_s <= max_delay_s."""

    slow: SlowPolicy = field(default_factory=SlowPolicy)
    detect_s: float  # without a pulse, until the detector reports silence
    hello_s: float = 10.0  # from the fork to its first message; until then a hang cannot be detected
    fence_grace_s: float = 10.0  # how long a lost process may take to exit, before it is killed
    leave_s: float = 30.0  # how long a leaving worker may take to exit, before it is killed
    stable_s: float = 2.0  # an end sooner than this after ready counts as a crash while starting
    first_delay_s: float = 0.25  # after the second such end in a row; doubled with each further end
    max_delay_s: float = 30.0
    max_failed_starts: int = 5  # in a row, in one seat, until the instance gives up (if it was never fully ready)
    isolate_s: float = 10.0  # how long the evacuation of a device at health level 5 may take
    heal_after_s: float = 30.0  # away for so long: its experts get other places, for redundancy; inf: never
    plan_after_s: float = 0.2  # after a loss: places for redundancy and balance are planned; for what has none, at once
    plan_within_s: float = 1.0  # the same, while experts have no place
    fill_again_s: float = 2.0  # after a fill that failed
    max_fills: int = 8  # in one message to a worker: routes follow when all of them are done
    blocked_s: float = 60.0  # how long a silent process may wait for a disk (state D), before it is lost
    max_unserved: int = 3  # reports by one peer within unserved_s: a worker with a pulse is lost after so many

    def __post_init__(self) -> None:
        assert self.detect_s > 0 and 0 < self.first_delay_s <= self.max_delay_s, self

    @property
    def starved_s(self) -> float:
        """How long a process that is not stopped may be silent: it may only be starved of CPU time."""
        return 10 * self.detect_s

    @property
    def unserved_s(self) -> float:
        """How long a report that a worker did not serve a peer counts. A worker that never serves is asked again as
        soon as it is trusted again, and collects reports quickly; one that fails only now and then stays."""
        return 200 * self.detect_s

    def delay_s(self, num_crashes: int) -> float:
        """How long the seat waits after this many early ends in a row: 0, 0, 0.25, 0.5, 1, ... seconds."""
        if num_crashes < 2:
            return 0.0
        doublings = min(num_crashes - 2, 60)
        return min(self.first_delay_s * float(2**doublings), self.max_delay_s)


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


# A seat holds at most one current incarnation. Each arrow to `gone` ends an incarnation for good: its later messages
# are dropped, though its process may exist for a while (the machine then has it killed).
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
# The end of a leaving worker is expected: no crash, unless it failed, hung or was killed from outside. Before its end a
# worker may be in doubt: silent, or reported by a peer. Doubt is not a state of the tables.
@dataclass(slots=True)
class Seat:
    """The state of one seat. Times are the host's monotonic clock."""

    goal: SeatGoal
    slots: int = 0  # per layer
    shadow_slots: int = 0
    held: HeldSlots | None = None  # what the incarnation reports to hold
    left: HeldSlots | None = None  # what the incarnation before held: it is still in the memory of the seat
    filling: tuple[Fill, ...] = ()  # what it was told to fill, and has not answered
    clearing: tuple[Place, ...] = ()  # what it was told to clear, likewise
    num_told: int = 0  # slots, so far
    is_stopped: bool = False  # it was told to drop what it has not begun of that
    fill_at: float | None = None  # after a fill that failed: when the next one may come
    heal_at: float | None = None  # while it is not ready: when all that it holds gets other places
    is_replaced: bool = False  # its experts have places elsewhere, besides those that are planned here
    is_overdue: bool = False  # it has been away for so long that nothing waits for it any more
    acknowledged: Epoch = field(default=Epoch(0))  # of the routes that an attention worker uses, by its report
    state: WorkerState = WorkerState.GONE
    incarnation: Incarnation = field(default=Incarnation(0))
    pid: int = 0
    note: str = ""
    delay_s: float = 0.0
    start_at: float | None = None  # while gone: when the next incarnation may start; None: never
    ready_at: float | None = None  # None: it never was
    leave_by: float | None = None  # while leaving: when it is killed; None: it was killed
    is_asked_to_leave: bool = (
        False  # by an operator, or because its seat should retire or change, or its device is left
    )
    num_crashes: int = 0  # early ends in a row
    num_failed_starts: int = 0  # incarnations in a row that were never ready
    has_spoken: bool = False
    hello_by: float | None = None  # it exists and has sent nothing: lost if still so at this time
    starve_at: float | None = None  # silent but not stopped: lost if still so at this time
    silent_since: float = 0.0  # while `starve_at` is set
    is_probed: bool = False  # a probe is not answered yet
    is_reported: bool = False  # a peer routes around it
    is_slow: bool = False  # slowness.py
    unserved_at: dict[Rank, list[float]] = field(default_factory=dict)  # by peer: when it did not serve that peer

    @property
    def rank(self) -> Rank:
        return self.goal.rank

    @property
    def id(self) -> WorkerId:
        """The incarnation that the seat holds, or held last."""
        return WorkerId(self.rank, self.incarnation)

    @property
    def is_retired(self) -> bool:
        """The seat is empty and will not be filled again."""
        return self.state is WorkerState.GONE and self.goal.wanted is Wanted.RETIRE

    @property
    def can_serve(self) -> bool:
        """Ready; or leaving, and still able to serve experts that no ready worker holds."""
        return self.state is WorkerState.READY or (self.state is WorkerState.LEAVING and self.ready_at is not None)

    @property
    def is_idle(self) -> bool:
        """It has changed all slots that it was told to change. It is told one thing at a time."""
        return not self.filling and not self.clearing

    def fill(self, fills: tuple[Fill, ...]) -> FillSlots:
        assert self.is_idle, self
        self.filling, self.num_told = fills, self.num_told + len(fills)
        return FillSlots(self.rank, self.incarnation, fills)

    def clear(self, places: tuple[Place, ...]) -> ClearSlots:
        assert self.is_idle, self
        self.clearing, self.num_told = places, self.num_told + len(places)
        return ClearSlots(self.rank, self.incarnation, places)

    def stop(self) -> StopChanges:
        self.is_stopped = True
        return StopChanges(self.rank, self.incarnation)

    def note_done(self, num_done: int) -> None:
        """So many of the slots that it was ever told. A report that it sent before it knew of the last ones does not
        answer them."""
        num_left = max(self.num_told - num_done, 0)
        self.filling = self.filling[max(len(self.filling) - num_left, 0) :]
        self.clearing = self.clearing[max(len(self.clearing) - num_left, 0) :]
        self.is_stopped &= num_left > 0

    @property
    def serves_soon(self) -> bool:
        """It is ready, or has its weights and is about to say so."""
        return self.state is WorkerState.READY or (self.state is WorkerState.STARTING and self.held is not None)

    @property
    def is_mapping(self) -> bool:
        """It was told to map experts in the memory of others. A worker does that alone, or copies."""
        if self.held is None or not self.filling:
            return False
        return self.held.is_mapped(Place(self.filling[0].layer_index, self.filling[0].slot))

    @property
    def maps(self) -> bool:
        """It is ready, and has slots for experts in the memory of others."""
        return self.state is WorkerState.READY and self.held is not None and self.held.num_mapped > 0

    @property
    def in_memory(self) -> HeldSlots | None:
        """What is in the memory of the seat, as far as that is known. It outlives its workers."""
        return self.held if self.held is not None else self.left

    @property
    def is_awaited(self) -> bool:
        """The next worker will find what is in the memory of the seat, and is expected soon."""
        return self.in_memory is not None and not self.is_overdue

    def forget_memory(self) -> None:
        """It is lost."""
        self.held = self.left = None

    def begin(self) -> None:
        """A new incarnation, starting."""
        assert self.state is WorkerState.GONE, self
        self.left = self.in_memory
        self.state = WorkerState.STARTING
        self.incarnation = Incarnation(self.incarnation + 1)
        self.pid = 0
        self.held, self.acknowledged, self.fill_at = None, Epoch(0), None
        self.filling, self.clearing, self.num_told, self.is_stopped = (), (), 0, False
        self.has_spoken = self.is_asked_to_leave = self.is_slow = False
        self.start_at = self.ready_at = None
        self.unserved_at = {}
        self.clear_doubt()

    def adopt(self, found: Found, now: float, policy: Policy) -> None:
        """Take over an incarnation that a previous orchestrator has provisioned."""
        assert self.state is WorkerState.GONE and found.pid >= 0, self
        self.state = WorkerState.STARTING
        self.incarnation = found.incarnation
        if found.pid > 0:
            self.exist(found.pid, now, policy)
        if found.has_reported or found.is_ready or found.is_leaving:
            self.speak()
        self.held = found.slots
        if found.is_ready:
            self.become_ready(-math.inf)  # the time is not known: it counts as stable
        if found.is_leaving:
            self.leave(now, policy)

    def exist(self, pid: int, now: float, policy: Policy) -> None:
        """The process exists. A hang before its hello cannot be detected, so the hello has a deadline."""
        if self.pid == 0 and not self.has_spoken:
            self.hello_by = now + policy.hello_s
        self.pid = pid

    def speak(self) -> None:
        """It has sent a message: its pulse runs, and the detector watches it."""
        self.has_spoken = True
        self.hello_by = None

    def become_ready(self, now: float) -> None:
        self.state = WorkerState.READY
        self.ready_at = now
        self.num_failed_starts = 0
        self.heal_at = None
        self.is_overdue = False
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
        """The next incarnation may start after this delay."""
        self.delay_s = delay_s
        self.start_at = now + delay_s

    def leave_empty(self, why: str) -> None:
        """There will be no next incarnation."""
        self.start_at = None
        self.note = f"not started again: {why}"

    def did_not_serve(self, peer: Rank, now: float, policy: Policy) -> int:
        """A peer reports that it was not served. Returns how many times it did within `unserved_s`; between two reports
        the peer had trusted this worker again."""
        lately = [at for at in self.unserved_at.get(peer, []) if now - at < policy.unserved_s]
        self.unserved_at[peer] = [*lately, now]
        return len(lately) + 1

    def clear_doubt(self) -> None:
        self.starve_at = None
        self.is_probed = self.is_reported = False

    def next_deadline(self) -> float | None:
        """While a probe is pending its answer decides, not the clock."""
        if self.state is WorkerState.GONE:
            deadlines = [self.start_at, self.heal_at]
        else:
            look_at = None if self.is_probed else self.starve_at
            deadlines = [self.hello_by, look_at, self.leave_by, self.heal_at, self.fill_at]
        return min((at for at in deadlines if at is not None), default=None)

    def worker(self) -> Worker:
        """The seat as the members table shows it."""
        note = self.note if self.start_at is None else f"{self.note}; next start in {self.delay_s:g} s"
        if self.goal.wanted is not Wanted.STAY and self.state not in (WorkerState.LEAVING, WorkerState.GONE):
            becomes = "retires" if self.goal.wanted is Wanted.RETIRE else f"becomes an {self.goal.next_role} worker"
            note = f"{becomes}: leaves when other workers have taken over its work"
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
            is_slow=self.is_slow,
            note=note,
        )
