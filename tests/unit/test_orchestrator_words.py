"""Words of workers to the orchestrator: those of a fenced worker do not act. Its decisions come one after the other."""

import gc
import selectors
from dataclasses import dataclass, field

import pytest

from everserve.control import effects, events
from everserve.control.anchor_client import Memory
from everserve.control.detector import Detector
from everserve.control.event_queue import Deciding
from everserve.control.inbox import Hearing
from everserve.control.log_references import Logs
from everserve.control.machine import Found, Machine, Policy, SeatSpec
from everserve.control.recovery import Recovery
from everserve.control.to_gateway import GatewayEnd
from everserve.control.worker_ends import WorkerEnd, WorkerEnds
from everserve.tables.ids import Epoch, Incarnation, Rank, Role
from everserve.tables.outputs import ExpertStats
from everserve.tables.symptoms import Symptom
from everserve.wire.channel import Channel
from everserve.wire.events import EventLog, StaleDropped
from everserve.wire.messages import (
    AnyMessage,
    ClusterChanged,
    EventHappened,
    ExpertReport,
    Failed,
    FoundProcess,
    Hello,
    Leaving,
    Ready,
    Report,
    Suspected,
)
from tests.in_process_experts import new_cell

RANKS = (Rank(0), Rank(1))
ROLES = (Role.ATTENTION, Role.EXPERT)  # both: no lanes are needed


@pytest.fixture(autouse=True)
def collect():
    """Sockets that are parts of cycles are closed now, not while another test counts descriptors."""
    yield
    gc.collect()


class Orchestrator:
    """The parts of the process around the machine that listen and decide; what is decided is noted."""

    def __init__(self, found: list[FoundProcess] | None = None) -> None:
        self.done: list[effects.AnyEffect] = []
        self.on_effect = lambda effect: None
        machine = Machine([SeatSpec(rank, ROLES) for rank in RANKS], None, Policy(detect_s=0.05))
        recovery = Recovery(found, 0.0) if found is not None else None
        self.deciding = Deciding(machine, recovery, self._carry_out)
        ours, theirs = Channel.pair()
        self.gateway, gateway = Channel(theirs), GatewayEnd(Channel(ours))
        self.ends = WorkerEnds(Memory(), 0, lambda rank: -1, self.deciding.tell)
        supervisor = Channel(Channel.pair()[0])
        self._selector = selectors.DefaultSelector()
        self.hearing = Hearing(
            self._selector,
            self.ends,
            Logs(Memory(), self.ends, supervisor),
            Detector(0.0),
            self.deciding,
            gateway,
            EventLog("orchestrator", None, gateway.tell),
        )
        self.gateway_end = gateway
        self.machine = machine

    def _carry_out(self, decision: effects.Decision) -> None:
        for effect in decision.effects:
            self.done.append(effect)
            self.on_effect(effect)

    def add(self, rank: Rank, incarnation: int = 1) -> "Worker":
        ours, theirs = Channel.pair()
        cell, cell_fd = new_cell()
        end = WorkerEnd(rank, Incarnation(incarnation), ROLES, 1000 + rank, cell_fd, cell, Channel(ours))
        self.ends.add(end)
        self.hearing.listen_to(end)
        return Worker(end, Channel(theirs), self)

    def counters(self) -> tuple[int, dict[Rank, ExpertStats]]:
        """As the gateway is told."""
        self.gateway_end.tell_cluster(self.machine.tables())
        changes = [message for message in self.gateway.receive_all() if isinstance(message, ClusterChanged)]
        return changes[-1].num_stale, changes[-1].expert_stats

    def epochs(self) -> list[int]:
        return [effect.members.epoch for effect in self.done if isinstance(effect, effects.Publish)]


@dataclass
class Worker:
    """A worker's end of its control channel."""

    end: WorkerEnd
    channel: Channel
    orchestrator: Orchestrator = field(repr=False)

    def say(self, message: AnyMessage) -> list[effects.AnyEffect]:
        """Returns what is done about it."""
        self.orchestrator.done.clear()
        self.channel.send(message)
        self.orchestrator.hearing.last_words(*self.end.seat)
        return list(self.orchestrator.done)


@pytest.fixture
def orchestrator() -> Orchestrator:
    """Rank 1 was lost and has a successor that is ready."""
    orchestrator = Orchestrator()
    orchestrator.deciding.start()
    for rank in RANKS:
        worker = orchestrator.add(rank)
        worker.say(Hello())
        worker.say(Ready())
    assert len(orchestrator.done) == 2, "ready, and all of them are"
    return orchestrator


@pytest.fixture
def fenced(orchestrator) -> Worker:
    """The first incarnation of rank 1, which lives on beside its successor."""
    orchestrator.deciding.tell(events.Silent(Rank(1), Incarnation(1), "T"))
    end = orchestrator.ends.get(Rank(1), Incarnation(1))
    orchestrator.ends.part(end)
    ours, theirs = Channel.pair()
    end.control = Channel(ours)
    successor = orchestrator.add(Rank(1), 2)
    successor.say(Hello())
    successor.say(Ready())
    successor.say(ExpertReport(stats=ExpertStats(num_batches=7)))
    return Worker(end, Channel(theirs), orchestrator)


@pytest.mark.parametrize(
    "message",
    [
        Suspected(rank=Rank(0), incarnation=Incarnation(1), reason=Symptom.DEAF),
        ExpertReport(stats=ExpertStats(num_batches=999)),
        Report(is_ready=True, is_leaving=False, epoch=Epoch(1000), peers=[], logs=[]),
        Hello(),
        Ready(),
        Leaving(),
        Failed(reason="out of luck", user_error=False),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_a_fenced_worker_says_is_counted_and_nothing_else(orchestrator, fenced, message):
    num_before, stats_before = orchestrator.counters()
    assert stats_before == {Rank(1): ExpertStats(num_batches=7)}, "its successor's"
    epoch = orchestrator.machine.epoch
    assert fenced.say(message) == []
    assert orchestrator.counters() == (num_before + 1, stats_before)
    assert orchestrator.machine.epoch == epoch


def test_the_same_from_a_worker_that_counts_acts(orchestrator):
    """So the test above could fail."""
    worker = Worker(orchestrator.ends.get(Rank(1), Incarnation(1)), None, orchestrator)
    ours, theirs = Channel.pair()
    worker.end.control, worker.channel = Channel(ours), Channel(theirs)
    suspected = Suspected(rank=Rank(0), incarnation=Incarnation(1), reason=Symptom.DEAF)
    assert worker.say(suspected) == [effects.Probe(Rank(0), Incarnation(1))]
    worker.say(ExpertReport(stats=ExpertStats(num_batches=999)))
    assert orchestrator.counters() == (0, {Rank(1): ExpertStats(num_batches=999)})


def test_events_of_a_fenced_worker_are_news(orchestrator, fenced):
    event = StaleDropped(process="worker-1", rank=1, incarnation=1, count=5, what="requests")
    assert fenced.say(EventHappened(event=event)) == []
    assert EventHappened(event=event) in orchestrator.gateway.receive_all()
    assert orchestrator.counters()[0] == 5


def test_last_words_of_a_fenced_worker_explain_a_start_that_failed():
    orchestrator = Orchestrator()
    orchestrator.deciding.start()
    worker = orchestrator.add(Rank(1))
    worker.say(Hello())
    orchestrator.deciding.tell(events.Died(Rank(1), Incarnation(1)))
    worker.end.is_lost = True
    assert effects.GiveUp("no room", True) in worker.say(Failed(reason="no room", user_error=True))


# One decision after the other


def test_a_resumed_machine_publishes_its_own_epoch_before_any_later_one():
    """Effects lead to events at once, here the death of a worker that is told of its loss."""
    found = [
        FoundProcess(rank=Rank(0), incarnation=Incarnation(1), pid=1000),
        FoundProcess(rank=Rank(1), incarnation=Incarnation(1), pid=-1),
    ]
    orchestrator = Orchestrator(found)
    orchestrator.deciding.tell(events.SaidHello(Rank(0), Incarnation(1)))  # waits

    def on_effect(effect: effects.AnyEffect) -> None:
        if isinstance(effect, effects.Lost) and effect.rank == Rank(1):
            orchestrator.deciding.tell(events.Exited(Rank(0), Incarnation(1), -9))

    orchestrator.on_effect = on_effect
    ready = Found(rank=Rank(0), incarnation=Incarnation(1), pid=1000, has_reported=True, is_ready=True)
    ended = Found(rank=Rank(1), incarnation=Incarnation(1), pid=-1)
    orchestrator.deciding.resume([ready, ended], Epoch(41), was_all_ready=True)
    assert orchestrator.epochs() == [42, 43]
    lost = [effect.rank for effect in orchestrator.done if isinstance(effect, effects.Lost)]
    assert lost == [Rank(1), Rank(0)], "what happened in between was decided, after the first decision was carried out"


@pytest.mark.parametrize("is_told", [True, False])
def test_what_an_effect_leads_to_is_decided_after_all_effects(orchestrator, is_told):
    kinds: list[str] = []

    def on_effect(effect: effects.AnyEffect) -> None:
        kinds.append(type(effect).__name__)
        if isinstance(effect, effects.Lost) and effect.rank == Rank(0):
            orchestrator.deciding.tell(events.Died(Rank(1), Incarnation(1)))

    orchestrator.on_effect = on_effect
    decide = orchestrator.deciding.tell if is_told else orchestrator.deciding.ask
    orchestrator.done.clear()
    decide(events.Died(Rank(0), Incarnation(1)))
    assert kinds == ["Lost", "Publish", "Provision"] * 2
    assert orchestrator.epochs() == sorted(orchestrator.epochs())
