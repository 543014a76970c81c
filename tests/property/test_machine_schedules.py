"""Random schedules against the orchestrator's machine, in a world of simulated processes.

Processes start, load, crash at any point, hang, starve and wake, leave in time or too slowly; what is known of them
arrives late, in any order between the supervisor, the channel and the detector, and for lost incarnations also twice;
peers suspect wrongly. The orchestrator itself dies, and a new machine resumes with what can be found. The world keeps
its own account of who may be trusted and compares after every step. When the faults end, everything heals.
"""

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from everserve.control.decide.effects import (
    AllReady,
    Decision,
    GiveUp,
    Kill,
    Lost,
    Probe,
    Provision,
    Publish,
    Show,
)
from everserve.control.decide.inputs import (
    Alive,
    ChannelEnded,
    Died,
    Exited,
    FromWorker,
    Said,
    SeatInput,
    Silent,
    Started,
    Tick,
)
from everserve.control.decide.machine import Found, Machine, Policy
from everserve.control.decide.seats import Seat
from everserve.plan.placement import place_experts
from everserve.tables.goal import Capacity
from everserve.tables.ids import Epoch, Incarnation, Rank, WorkerId
from everserve.tables.members import WorkerState
from everserve.tables.slots import EMPTY, Fill, HeldSlots
from everserve.tables.validity import degraded
from everserve.tables.work import Work
from everserve.wire.events import WorkerBackedOff
from everserve.wire.messages import (
    Ask,
    ClearSlots,
    Failed,
    FillSlots,
    Hello,
    KeepGoal,
    Leave,
    Leaving,
    PaceReported,
    Ready,
    Report,
    RoutesUsed,
    Shutdown,
    SlotsReported,
    Suspected,
)
from everserve.wire.operators import DrainRequest
from tests.support.decisions import answered, ask, is_told
from tests.support.examples import examples
from tests.support.held_slots import goal_of, held

POLICY = Policy(detect_s=0.05, heal_after_s=math.inf)
RESUMED = "resumed"  # stands for the event that leads to a decision
Key = tuple[Rank, Incarnation]


@dataclass
class Process:
    """One incarnation, and what is on its way from it to the machine: three ways, each in order."""

    rank: Rank
    incarnation: Incarnation
    slots: HeldSlots | None  # of an expert worker
    num_done: int = 0  # of the slots that this orchestrator has told it
    phase: int = 0  # asked for, exists, said hello, said ready
    is_dead: bool = False
    is_stopped: bool = False
    is_starved: bool = False
    is_fenced: bool = False
    was_asked: bool = False  # to leave
    is_leaving: bool = False
    is_slow: bool = False  # to leave: it never ends by itself
    owes_report: bool = False  # to a new orchestrator; whatever it says before is said to nobody
    looks_silent: bool = False  # as the detector sees it
    ways: dict[str, deque[SeatInput]] = field(
        default_factory=lambda: {"supervisor": deque(), "channel": deque(), "detector": deque()}
    )

    @property
    def key(self) -> Key:
        return self.rank, self.incarnation

    def send(self, way: str, kind: type[SeatInput], *details) -> None:
        self.ways[way].append(kind(self.rank, self.incarnation, *details))

    def say(self, message: FromWorker) -> None:
        self.send("channel", Said, message)

    def go_on(self) -> None:
        """The next thing that it does by itself."""
        if self.is_dead or self.is_stopped:
            return
        if self.is_fenced and self.phase > 0:
            self.die(1)
        elif self.owes_report:
            self.owes_report, self.phase = False, 3
            report = Report(
                is_ready=True, is_leaving=self.is_leaving, epoch=Epoch(0), peers=[], memory=[], slots=self.slots
            )
            self.say(report)
            self.say(Ready())
        elif self.is_leaving:
            if not self.is_slow:
                self.die(0)
        elif self.was_asked:
            self.leave()
        elif self.phase == 0:
            self.send("supervisor", Started, 1000 + self.incarnation)
            self.phase = 1
        elif self.phase < 3:
            if self.phase == 2 and self.slots is not None:
                self.say(SlotsReported(slots=self.slots))
            self.say(Hello() if self.phase == 1 else Ready())
            self.phase += 1

    def fill(self, fills: Sequence[Fill]) -> None:
        """At once; what may happen meanwhile is in test_moves.py."""
        assert self.slots is not None
        experts = [[*slots] for slots in self.slots.experts]
        for layer, slot, expert in fills:
            experts[layer][slot] = expert
        self.slots = msgspec.structs.replace(self.slots, experts=tuple(map(tuple, experts)))
        self.num_done += len(fills)
        if not self.is_dead:
            self.say(SlotsReported(slots=self.slots, num_done=self.num_done))

    def leave(self, is_slow: bool = False) -> None:
        if self.phase >= 2 and not (self.is_dead or self.is_stopped or self.is_leaving):
            self.is_leaving, self.is_slow = True, is_slow
            if not self.owes_report:
                self.say(Leaving())

    def fail(self, user_error: bool = False) -> None:
        if not self.is_dead and not self.is_stopped and self.phase > 0:
            self.say(Failed(reason="out of luck", user_error=user_error))
            self.die(1)

    def stop(self) -> None:
        self.is_stopped = self.phase > 0

    def die(self, status: int) -> None:
        if self.is_dead:
            return
        self.is_dead = True
        self.send("supervisor", Exited, status)
        if self.phase >= 1:
            self.send("channel", ChannelEnded)
        if self.phase >= 2:
            self.send("detector", Died)

    def detect(self) -> None:
        """The detector notices a change."""
        is_silent = self.is_stopped or self.is_starved
        if self.is_dead or self.phase < 2 or is_silent == self.looks_silent:
            return
        self.looks_silent = is_silent
        self.send("detector", *self.looks())

    def looks(self) -> tuple:
        if self.is_dead:
            return (Died,)
        if self.looks_silent:
            return Silent, "T" if self.is_stopped else "R" if self.is_starved else "S"
        return (Alive,)

    def outlive_orchestrator(self, chance: int) -> Found:
        """All that was on its way is lost; what the supervisor knows it tells again, and a report may come late."""
        exited = [event for event in self.ways["supervisor"] if isinstance(event, Exited)]
        is_reaped = self.is_dead and not (exited and chance % 2)
        for way in self.ways.values():
            way.clear()
        if self.is_dead and not is_reaped:
            self.ways["supervisor"].extend(exited)
        self.looks_silent = False
        has_reported = self.phase >= 2 and not (self.is_dead or self.is_stopped or self.is_starved) and chance % 5 > 0
        self.owes_report = self.phase > 0 and not self.is_dead and not has_reported
        self.num_done = 0
        return Found(
            rank=self.rank,
            incarnation=self.incarnation,
            pid=-1 if is_reaped else 0 if self.phase == 0 else 1000 + self.incarnation,
            has_reported=has_reported,
            is_ready=has_reported and self.phase == 3,
            is_leaving=has_reported and self.is_leaving,
            slots=self.slots if has_reported and self.phase == 3 else None,
        )


def holds(seat: Seat, layer: int, expert: int) -> bool:
    filling = [fill.slot for fill in seat.filling if fill.call_index == layer]
    slots = seat.held.experts[layer] if seat.held is not None else ()
    return any(held == expert and slot not in filling for slot, held in enumerate(slots))


class World:
    """The host, the processes, and an account of its own of who is live and who may be trusted."""

    def __init__(self, num_attention: int, num_expert: int, shadow_experts: int | None) -> None:
        expert_ranks = [Rank(num_attention + i) for i in range(num_expert)]
        placement = place_experts(6, (0, 1), expert_ranks, shadow_experts) if num_expert else None
        goal = goal_of(range(num_attention), placement)
        self.num_slots = placement.num_slots if placement is not None else 0
        self.goal = goal  # as the supervisor keeps it
        self.new_machine = lambda: Machine(self.goal, POLICY, Capacity(max_workers=64, slots_per_layer=self.num_slots))
        self.ranks = [seat.rank for seat in goal.seats]
        self.now = 10.0
        self.processes: dict[Key, Process] = {}
        self.live: dict[Rank, Incarnation] = {}  # provisioned and not lost
        self.lost_at: dict[Key, float] = {}
        self.told_lost: set[Key] = set()  # what the gateway knows, whoever the orchestrator is
        self.reaped: set[Key] = set()
        self.old: list[SeatInput] = []
        self.was_all_ready = self.gave_up = self.is_stopping = False
        self.reads_last_words = False  # as the host does before it tells of a death; the machine need not rely on it
        self.begin(self.new_machine())
        self.tables = self.machine.tables()
        self.apply(self.machine.start(self.now), None)

    def begin(self, machine: Machine) -> None:
        """What is forgotten with an orchestrator."""
        self.machine = machine
        self.trusted: dict[Rank, Incarnation] = {}  # live, said ready, and does not leave
        self.leaving_at: dict[Key, float] = {}  # live, and leaves since
        self.last_resort: set[Rank] = set()  # leaves, and was trusted before
        self.silent_at: dict[Key, float] = {}  # not stopped, and silent since
        self.reported: set[Key] = set()
        self.doubted: set[Key] = set()  # reported while routes led to it: peers wait for a new epoch to trust it again
        self.probes: list[Key] = []
        self.unanswered: set[Key] = set()  # probed, and neither the probe nor the detector has said anything since
        self.num_faults: Counter[Rank] = Counter()
        self.has_said_all_ready = False

    # -- telling the machine, and what must hold afterwards --------------------------------------

    def tell(self, event) -> None:
        what, key = event, None  # what is said, and about which incarnation
        if isinstance(event, SeatInput):
            what = event.message if isinstance(event, Said) else event
            key = (what.rank, what.incarnation) if isinstance(what, Suspected) else (event.rank, event.incarnation)
        is_live = key is not None and all(self.live.get(one) == n for one, n in (key, (event.rank, event.incarnation)))
        if is_live and isinstance(what, Ready) and key not in self.leaving_at:
            self.trusted[key[0]] = key[1]
        leaves = isinstance(what, Leaving) or (isinstance(what, Report) and what.is_leaving)
        if is_live and leaves:
            self.leaving_at.setdefault(key, self.now)
            if self.trusted.pop(key[0], None) is not None:
                self.last_resort.add(key[0])
        if is_live and isinstance(what, Silent):
            self.silent_at.setdefault(key, self.now)
        if is_live and isinstance(what, Suspected):
            self.reported.add(key)
            if key[0] in self.last_resort or key[0] in self.trusted:
                self.doubted.add(key)
        if is_live and isinstance(what, Silent | Alive):
            self.unanswered.discard(key)
        # Before it is told: what is decided may begin an incarnation of which a message came too early.
        teller = self.processes.get((event.rank, event.incarnation)) if isinstance(event, SeatInput) else None
        num_stale, epoch = self.machine.num_stale, self.machine.epoch
        is_alone = not isinstance(what, Died | ChannelEnded | Exited | SlotsReported) or len(self.old) % 3 > 0
        decision = self.machine.handle(event, self.now, is_last=is_alone)  # otherwise a tick follows, or more events
        self.apply(decision, event)
        self.check_what_is_kept()
        if isinstance(event, Ask):
            can_be_asked = event.request.rank in self.trusted and not (self.gave_up or self.is_stopping)
            if "is not asked to leave yet" in decision.reason:  # others of its kind are on their way back
                assert can_be_asked
                can_be_asked = False
            assert len(decision.effects) == 1 + can_be_asked, decision
            assert bool(answered(decision).refused) == (not can_be_asked)
        if isinstance(what, Ready | Leaving | Alive | Hello) and not is_live:
            assert self.machine.num_stale == num_stale + 1, "a lost process spoke and nobody counted"
        if is_live and isinstance(what, Alive):
            self.silent_at.pop(key, None)
            self.reported.discard(key)
            if key in self.doubted:
                self.doubted.remove(key)
                assert self.machine.epoch == epoch + 1, "peers go on suspecting it"
        if teller is not None:
            self.old.append(event)
            if isinstance(event, Exited) and teller.is_dead:
                self.reaped.add((event.rank, event.incarnation))

    def check_what_is_kept(self) -> None:
        """What the machine keeps of its seats is what it would find if it looked at all of them."""
        cluster = self.machine._cluster
        deadlines = [at for seat in cluster.seats.values() if (at := seat.next_deadline()) is not None]
        assert cluster.next_deadline() == min(deadlines, default=None)
        shown = [seat.worker(*cluster._slots[rank]) for rank, seat in cluster.seats.items() if not seat.is_retired]
        assert [*cluster.members_of(self.machine.epoch).workers] == shown
        assert cluster.has_other_members == (cluster.members_of(self.machine.epoch) != self.machine.members)

    def apply(self, decision, event) -> None:
        assert decision.reason
        published = False
        for effect in decision.effects:
            if isinstance(effect, Publish):
                assert not published, "two epochs in one decision"
                published = True
                self.check_published(effect, event)
            elif isinstance(effect, Lost):
                assert not published, "fenced after the new tables"
                self.on_lost(effect, event)
            elif isinstance(effect, Provision):
                self.on_provision(effect)
            elif isinstance(effect, Show):
                self.tables = effect.tables
            elif isinstance(effect, KeepGoal):
                self.goal = effect.goal
            elif is_told(effect, FillSlots):
                self.processes[effect.rank, effect.incarnation].fill(effect.message.fills)
            elif is_told(effect, ClearSlots):
                emptied = [Fill(*place, EMPTY) for place in effect.message.places]
                self.processes[effect.rank, effect.incarnation].fill(emptied)
            elif isinstance(effect, Kill):
                self.on_kill(effect, event)
            elif isinstance(effect, Probe):
                assert self.live.get(effect.rank) == effect.incarnation
                assert self.processes[effect.rank, effect.incarnation].phase >= 2, "nothing to look at yet"
                assert (effect.rank, effect.incarnation) not in self.unanswered, "one look at a time"
                self.unanswered.add((effect.rank, effect.incarnation))
                self.probes.append((effect.rank, effect.incarnation))
            elif isinstance(effect, WorkerBackedOff):
                assert effect.rank not in self.live
                assert effect.num_crashes <= self.num_faults[effect.rank], "who left was counted as a crash"
            elif is_told(effect, Leave):
                assert isinstance(event, Ask | Tick) or isinstance(event.message, PaceReported)
                assert self.trusted[effect.rank] == effect.incarnation
                self.processes[effect.rank, effect.incarnation].was_asked = True
            elif isinstance(effect, AllReady):
                assert not self.has_said_all_ready and not self.gave_up and not self.is_stopping
                assert set(self.trusted) == set(self.ranks)
                self.was_all_ready = self.has_said_all_ready = True
            elif isinstance(effect, GiveUp):
                assert not self.was_all_ready and not self.gave_up and not self.is_stopping
                self.gave_up = True
        for effect in decision.effects:
            if isinstance(effect, Lost) and effect.cause == "left":
                assert (effect.rank in self.live) == (not self.gave_up and not self.is_stopping), "replaced at once"
        if self.machine.has_postponed:
            self.deliver(len(self.old))
        if self.machine.next_deadline() == -math.inf and not isinstance(event, Tick):
            self.tell(Tick())  # as the host does, when it has read what there is to read
            return
        if isinstance(event, Tick):
            deadline = self.machine.next_deadline()
            if published and deadline is not None and deadline <= self.now:
                self.tell(Tick())  # routes that cover everything make the rest of a plan due
                return
            assert deadline is None or deadline > self.now, "a deadline that a tick does not answer"
        self.check_tables()

    def on_lost(self, effect: Lost, event) -> None:
        key = (effect.rank, effect.incarnation)
        assert self.live.pop(effect.rank) == effect.incarnation, "lost twice, or another one"
        has_left = effect.cause == "left"
        assert effect.is_expected == (self.is_stopping or has_left) or "gave up" in self.machine.ending
        assert not has_left or key in self.leaving_at, "nobody said that it leaves"
        if isinstance(event, Exited) and key in self.leaving_at:
            is_late = self.leaving_at[key] == -math.inf  # and was killed
            assert has_left == (event.exit_status == 0 or is_late)
        if "though not stopped" in effect.reason:
            assert self.now - self.silent_at[key] >= POLICY.starved_s - 1e-9, "it was only starved"
        self.num_faults[effect.rank] += not has_left
        self.trusted.pop(effect.rank, None)
        self.leaving_at.pop(key, None)
        self.last_resort.discard(effect.rank)
        self.fence(key)

    def fence(self, key: Key) -> None:
        self.lost_at[key] = self.now
        self.told_lost.add(key)
        self.processes[key].is_fenced = True

    def on_provision(self, effect: Provision) -> None:
        assert effect.rank not in self.live, "two incarnations that count in one seat"
        assert not self.gave_up and not self.is_stopping
        newest = max((i for rank, i in self.processes if rank == effect.rank), default=0)
        assert effect.incarnation == newest + 1
        self.live[effect.rank] = effect.incarnation
        planned = self.goal.placement.seat(effect.rank) if self.goal.placement is not None else None
        slots = held(self.goal.placement, effect.rank, self.num_slots) if planned is not None else None
        process = Process(effect.rank, effect.incarnation, slots)
        self.processes[process.key] = process

    def on_kill(self, effect: Kill, event) -> None:
        key = (effect.rank, effect.incarnation)
        if key in self.leaving_at:
            assert self.now >= self.leaving_at[key] + POLICY.leave_s > 0, "it had time left, or was killed before"
            self.leaving_at[key] = -math.inf
            self.processes[key].die(-9)
            return
        assert key in self.lost_at, "killed somebody who counts"
        if not isinstance(event, Started):
            assert self.now >= self.lost_at[key] + POLICY.fence_grace_s, "no grace"
            assert key not in self.reaped, "it had ended"
        if self.processes[key].phase > 0:
            self.processes[key].die(-9)

    def check_published(self, tables: Publish, event) -> None:
        assert tables.members.epoch > self.tables.members.epoch
        changed = tables.members.workers != self.tables.members.workers
        if not changed and event is not RESUMED:
            is_moved = isinstance(event, Tick) or (isinstance(event, Said) and isinstance(event.message, Report))
            assert is_moved or (event.rank, event.incarnation) in self.reported, "for nothing"
            assert is_moved or isinstance(event, Alive), "for nothing"
        self.tables = tables
        for process in self.processes.values():
            if process.slots is None and process.phase == 3 and not process.is_dead:
                process.say(RoutesUsed(epoch=tables.members.epoch))

    def check_tables(self) -> None:
        tables, placement = self.tables, self.machine.goal.placement
        assert self.machine.tables() is tables
        for worker in tables.members.workers:
            assert (worker.state is WorkerState.READY) == (worker.rank in self.trusted), worker
            assert (worker.state is WorkerState.LEAVING) == ((worker.rank, worker.incarnation) in self.leaving_at)
            if worker.rank in self.live:
                assert worker.incarnation == self.live[worker.rank]
                assert worker.state is not WorkerState.GONE
            else:
                assert worker.state is WorkerState.GONE
        if placement is not None:
            rank_LEC = tables.routes.array()[..., 0].tolist()
            slow = {worker.rank for worker in tables.members.workers if worker.is_slow}
            for layer, expert in product(range(len(placement.moe_layers)), range(placement.num_experts)):
                # A slot that is needed for another expert may be in no routes, but not the last one of its expert;
                # none that is being filled is.
                places = {seat.rank for seat in self.machine._seats.values() if holds(seat, layer, expert)}
                routed = set(rank_LEC[layer][expert]) - {-1}
                serving = places & set(self.trusted) or places & self.last_resort
                assert routed <= serving and bool(routed) == bool(serving)
                is_slow = [rank in slow for rank in rank_LEC[layer][expert] if rank >= 0]
                assert is_slow == sorted(is_slow), "a slow worker is asked before another one"
        assert set(tables.conditions.peers + tables.conditions.coverage) == set(tables.violations)
        assert tables.degraded == degraded(tables.members, placement, tables.routes)
        for sentence in tables.violations:
            assert sentence.endswith("no attention worker is ready") or "no place" in sentence, sentence

    # -- the orchestrator dies -------------------------------------------------------------------

    def lose_orchestrator(self, n: int) -> None:
        if self.gave_up or self.is_stopping:
            return  # then it is not replaced
        self.lose_orders(n)
        found = self.find(n)
        self.begin(self.new_machine())
        latest = {one.rank: one for one in found}
        holders = {rank: one for rank, one in latest.items() if one.pid >= 0 and not one.was_lost}
        self.live = {rank: one.incarnation for rank, one in holders.items()}
        self.trusted = {rank: self.live[rank] for rank, one in holders.items() if one.is_ready and not one.is_leaving}
        self.leaving_at = {(rank, self.live[rank]): self.now for rank, one in holders.items() if one.is_leaving}
        self.last_resort = {rank for rank, one in holders.items() if one.is_leaving and one.is_ready}
        shuffled = sorted(found, key=lambda one: (one.incarnation * n, one.rank))
        decision = self.machine.resume(self.now, shuffled, self.tables.members.epoch, self.was_all_ready)
        self.expect_losses(found, latest, decision)
        rest = tuple(effect for effect in decision.effects if not isinstance(effect, Lost))
        self.apply(Decision(rest, decision.reason), RESUMED)

    def lose_orders(self, n: int) -> None:
        """What was provisioned and has no process yet may not have reached the supervisor."""
        for key, process in list(self.processes.items()):
            if process.phase == 0 and not process.is_dead and (n := n * 7 + 3) % 2:
                del self.processes[key]

    def find(self, n: int) -> list[Found]:
        """In the order of incarnations. The gateway, too, may be too late with what it knows."""
        found = []
        for number, key in enumerate(sorted(self.processes)):
            one = self.processes[key].outlive_orchestrator(n // 3 + number * 7)
            if one.pid < 0:
                self.reaped.add(key)
            found.append(dataclasses.replace(one, was_lost=n % 3 > 0 and key in self.told_lost))
        return found

    def expect_losses(self, found: list[Found], latest: dict[Rank, Found], decision: Decision) -> None:
        """Everybody who lives and holds no seat is fenced again; an end that nobody told is told."""
        lost = {(effect.rank, effect.incarnation): effect for effect in decision.effects if isinstance(effect, Lost)}
        for one in found:
            key, is_latest = (one.rank, one.incarnation), latest[one.rank] is one
            effect = lost.pop(key, None)
            if self.live.get(one.rank) == one.incarnation:
                assert effect is None, "it counts"
                self.processes[key].is_fenced &= key in self.told_lost
                self.lost_at.pop(key, None)
            elif one.pid >= 0:
                assert effect is not None and effect.is_expected
                self.fence(key)
            else:
                assert (effect is not None) == (is_latest and not one.was_lost)
                self.fence(key)
        assert not lost, "nobody knows them"

    # -- what may happen -------------------------------------------------------------------------

    def deliver(self, n: int) -> None:
        ways = [(process, way) for process in self.processes.values() for way in process.ways.values() if way]
        if ways:
            process, way = ways[n % len(ways)]
            while self.reads_last_words and process.ways["channel"] and way and isinstance(way[0], Exited | Died):
                self.tell(process.ways["channel"].popleft())
            if way:  # what was told may have been told together with it
                self.tell(way.popleft())

    def answer_probe(self, n: int) -> None:
        if self.probes:
            key = self.probes.pop(n % len(self.probes))
            kind, *details = self.processes[key].looks()
            self.tell(kind(*key, *details))

    def pick(self, n: int) -> Process:
        """More often than not one that counts."""
        keys = list(self.live.items()) if n % 4 and self.live else list(self.processes)
        return self.processes[keys[n // 4 % len(keys)]]

    def replay(self, n: int) -> None:
        old = [event for event in self.old if self.live.get(event.rank) != event.incarnation]
        if old:
            self.tell(old[n % len(old)])

    def invent(self, n: int) -> None:
        rank = self.ranks[n % len(self.ranks)]
        incarnation = max(i for r, i in self.processes if r == rank) + 1 + n % 2
        kind, *details = [(Said, Ready()), (Exited, 0), (Alive,), (Silent, "T"), (Died,)][n // 7 % 5]
        if n % 3 == 0:
            rank = Rank(max(self.ranks) + 1)
        self.tell(kind(rank, incarnation, *details))

    def tick(self, n: int) -> None:
        deadline = self.machine.next_deadline()
        if n % 2 and deadline is not None:
            self.now = max(self.now, deadline)
        self.tell(Tick())

    def step(self, n: int) -> None:
        n, action = divmod(n, len(ACTIONS))
        n, dt = divmod(n, 8)
        self.now += [0.0, 0.0, 0.001, 0.01, 0.05, 0.3, 1.0, 4.0][dt]
        ACTIONS[action](self, n)

    def step_without_faults(self, n: int) -> None:
        n, action = divmod(n, len(ORDERLY))
        self.now += 0.001
        ORDERLY[action](self, n)

    def heal(self, with_cores: bool = True) -> None:
        """No more faults. Fenced processes are deaf, so that only a kill ends them; so are those starved for ever. Not
        deaf is who was fenced by an orchestrator whose successor does not know."""
        for _ in range(2000):
            for process in list(self.processes.values()):
                process.is_starved &= not with_cores
                if not process.is_fenced or self.live.get(process.rank) == process.incarnation:
                    process.go_on()
                process.detect()
            was_probed = bool(self.probes)  # then there may be a new process, which has not gone on yet
            while self.probes:
                self.answer_probe(0)
            if any(way for process in self.processes.values() for way in process.ways.values()):
                self.deliver(0)
            elif (deadline := self.machine.next_deadline()) is not None:
                self.now = max(self.now, deadline)
                self.tell(Tick())
            elif not was_probed and not any(process.looks() != (Alive,) for process in self.current()):
                return
        raise AssertionError("it never settles")

    def pace(self, n: int) -> None:
        """For some seconds one worker takes far longer than all others."""
        slow = self.ranks[n % len(self.ranks)]
        for _ in range(1 + n % 7):
            self.now += 0.5
            works = {rank: Work(10.0 if rank == slow else 1.0, (100,)) for rank in self.ranks}
            asked = [(WorkerId(rank, i), works[rank]) for rank, i in self.live.items() if self.placed(rank)]
            for rank, incarnation in [*self.trusted.items()]:
                if self.trusted.get(rank) == incarnation and not self.placed(rank):
                    self.tell(Said(rank, incarnation, PaceReported(own=works[rank], peers=tuple(asked))))

    def placed(self, rank: Rank) -> bool:
        placement = self.machine.goal.placement
        return placement is not None and placement.seat(rank) is not None

    def report(self, n: int, reason: str) -> None:
        """A peer suspects it, rightly or wrongly."""
        rank, incarnation = self.pick(n).key
        suspected = Suspected(rank=rank, incarnation=incarnation, reason=reason)
        self.tell(Said(self.ranks[0], self.live.get(self.ranks[0], Incarnation(1)), suspected))

    def current(self) -> list[Process]:
        return [self.processes[key] for key in self.live.items()]


ACTIONS = [
    *[World.deliver] * 9,
    *[lambda world, n: world.pick(n).go_on()] * 6,
    *[World.answer_probe] * 2,
    *[World.tick] * 2,
    *[lambda world, n: world.pick(n).detect()] * 3,
    lambda world, n: world.pick(n).die([-9, -11, 0, 1, 7][n % 5]),
    lambda world, n: world.pick(n).fail(),
    lambda world, n: world.pick(n).stop(),
    lambda world, n: setattr(world.pick(n), "is_stopped", False),
    lambda world, n: setattr(world.pick(n), "is_starved", True),
    lambda world, n: setattr(world.pick(n), "is_starved", False),
    lambda world, n: world.pick(n).leave(is_slow=n % 3 == 0),
    lambda world, n: world.tell(ask(DrainRequest(rank=world.ranks[n % len(world.ranks)]))),
    World.lose_orchestrator,
    World.pace,
    lambda world, n: world.report(n, "silent"),
    lambda world, n: world.report(n, "deaf"),
    World.replay,
    World.invent,
]
ORDERLY = [
    *[World.deliver] * 3,
    *[lambda world, n: world.pick(n).go_on()] * 3,
    lambda world, n: world.pick(n).leave(is_slow=n % 3 == 0),
    lambda world, n: world.tell(ask(DrainRequest(rank=world.ranks[n % len(world.ranks)]))),
]
SHAPES = [(1, 0, None), (2, 0, None), (1, 1, None), (1, 2, None), (2, 3, None), (1, 3, 1)]
schedules = st.lists(st.integers(0, len(ACTIONS) * 8 * 1000), min_size=20, max_size=150)


@examples(38)
@given(schedules, st.sampled_from(SHAPES), st.booleans(), st.booleans())
@example([31, 31, 208, 280472, 0, 0, 557], (1, 0, None), True, False)
def test_whatever_happens_tables_are_sound_and_everything_heals(schedule, shape, is_warm, with_cores):
    world = World(*shape)
    if is_warm:
        world.heal()
        assert world.was_all_ready
    for n in schedule:
        world.step(n)
    world.heal(with_cores)
    if world.gave_up:
        assert not world.was_all_ready
        return
    assert world.was_all_ready
    assert set(world.trusted) == set(world.ranks)
    assert (world.machine.violations, world.machine.degraded) == ((), ())
    for process in world.processes.values():
        assert process.is_dead == (world.live.get(process.rank) != process.incarnation), "somebody was forgotten"


@examples(13)
@given(schedules, st.sampled_from(SHAPES), st.booleans())
def test_leaving_is_never_a_fault(schedule, shape, is_warm):
    """However often, and before it was ready or long after."""
    world = World(*shape)
    world.reads_last_words = True  # that it leaves
    if is_warm:
        world.heal()
    for n in schedule:
        world.step_without_faults(n)
    world.heal()
    assert world.num_faults.total() == 0 and not world.gave_up
    assert set(world.trusted) == set(world.ranks)
    for process in world.current():
        process.die(-9)  # the first crash of all: nobody waits
    world.heal()


@examples(13)
@given(schedules, st.integers(0, 150), st.sampled_from(SHAPES))
def test_a_stopping_instance_starts_nobody_and_ends(schedule, stop_after, shape):
    world = World(*shape)
    world.heal()
    for n in schedule[:stop_after]:
        world.step(n)
    world.is_stopping = True
    world.tell(Shutdown(grace_s=0.0))
    for n in schedule[stop_after:]:
        world.step(n)
    for process in world.current():
        process.is_stopped = False
        process.die(0)
    world.heal()
    assert not world.live
    assert all(process.is_dead or process.phase == 0 for process in world.processes.values())


@examples(13)
@given(schedules, st.integers(0, 1000), st.integers(0, 40))
def test_a_user_error_before_all_are_ready_gives_up_and_later_never(schedule, victim, at):
    world = World(2, 2, None)
    for n in schedule[:at]:
        world.step(n)
    process = world.pick(victim)
    was_up, can_fail = world.was_all_ready, process.phase > 0 and not process.is_dead and not process.is_stopped
    gave_up = world.gave_up
    process.fail(user_error=True)
    ways = list(process.ways.values())
    for way in ways if victim % 2 else reversed(ways):  # its last words, before or after its death is seen
        while way:
            world.tell(way.popleft())
    if can_fail:
        assert world.gave_up == (not was_up or gave_up)
    for n in schedule[at:]:
        world.step(n)
