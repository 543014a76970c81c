"""Typed events become sentences: one entry per fault, with all that came of it."""

from typing import Any

import pytest

from everserve.gateway.observe.timeline import Timeline
from everserve.tables.ids import Role
from everserve.tables.members import WorkerState
from everserve.wire import events as ev
from tests.support.gateway_toy import member

SLOTS = {"roles": (Role.EXPERT,), "slots": 64, "shadow_slots": 32}


class Told:
    """A timeline of two attention and two expert workers; the clock starts at 100."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.workers = [member(0), member(1), member(2, **SLOTS), member(3, **SLOTS)]
        self.timeline.learn(self.workers)

    def happens(self, kind: type[ev.Event], at_s: float, **fields: Any) -> None:
        self.timeline.add(kind(process="x", pid=1, at_s=at_s, unix_s=1000.0 + at_s, **fields))  # type: ignore[arg-type]

    def ticks(self, now_s: float, pause_s: float | None = None, waiting_s: float = 0.0) -> None:
        self.timeline.measure(now_s, lambda from_s, to_s: pause_s, waiting_s)

    def kill(self, rank: int, at_s: float, **changes: Any) -> None:
        fields = {"rank": rank, "incarnation": 1, "victim_pid": 9, "signal": "KILL", **changes}
        self.happens(ev.FaultInjected, at_s, **fields)

    def detect(self, rank: int, at_s: float, **changes: Any) -> None:
        roles = ("attention",) if rank < 2 else ("expert",)
        fields = {"rank": rank, "incarnation": 1, "roles": roles, "cause": "crash", "reason": "life word", **changes}
        self.happens(ev.FaultDetected, at_s, **fields)

    def suspect(self, rank: int, at_s: float, by: int = 0, reason: str = "died", incarnation: int = 1) -> None:
        self.happens(ev.SuspectedEvent, at_s, by=by, rank=rank, incarnation=incarnation, reason=reason)

    def publish(self, at_s: float) -> None:
        self.happens(ev.EpochPublished, at_s, epoch=2, reason="r", violations=())

    def ready(self, rank: int, at_s: float, incarnation: int = 2) -> None:
        fields = {"rank": rank, "incarnation": incarnation, "load_s": 0.1, "num_blocks": 0, "num_slots": 64}
        self.happens(ev.WorkerBecameReady, at_s, **fields)

    @property
    def sentences(self) -> list[str]:
        return [entry.sentence for entry in self.timeline.entries()]


@pytest.fixture
def told() -> Told:
    return Told()


def test_an_expert_worker_is_killed(told: Told) -> None:
    """In the order in which the gateway hears of it: what the orchestrator passes on comes after its own words."""
    told.kill(3, 100.0)
    assert told.sentences == ["SIGKILL sent to expert worker 3"]
    told.detect(3, 100.004)
    told.publish(100.005)
    told.suspect(3, 100.001, by=0)
    told.suspect(3, 100.003, by=1)
    told.happens(ev.RowsReplayed, 100.003, rank=1, suspect=3, layer=2, num_rows=24)
    told.ticks(100.1, pause_s=0.020)
    (entry,) = told.timeline.entries()
    assert entry.is_open and entry.kind == "fault" and entry.pause_ms == 20.0
    told.ready(3, 100.9)
    (entry,) = told.timeline.entries()
    assert entry.sentence == (
        "expert worker 3 died (SIGKILL) · noticed in 1.0 ms · 32 experts per layer moved to their shadows in 3.0 ms · "
        "24 rows sent again · longest pause 20 ms · 0 tokens lost · replaced after 0.9 s"
    )
    assert not entry.is_open and entry.ended_unix_s == 1100.9


def test_noticed_later_than_any_stream_waited(told: Told) -> None:
    """Nothing needed that worker just then; the two times must not read as a contradiction."""
    told.kill(3, 100.0)
    told.detect(3, 100.077)
    told.ticks(100.2, pause_s=0.038)
    told.ready(3, 100.9)
    assert told.sentences == [
        "expert worker 3 died (SIGKILL) · noticed in 77 ms, streams went on meanwhile · longest pause 38 ms · "
        "0 tokens lost · replaced after 0.9 s"
    ]


def test_the_gateway_may_notice_before_the_orchestrator(told: Told) -> None:
    told.kill(1, 100.0)
    parted = {"request_id": "a", "from_rank": 1, "to_rank": 0, "num_known": 5, "stalled_s": 0.004}
    told.happens(ev.RequestResumed, 100.006, **parted)
    told.detect(1, 100.077)
    told.ticks(100.2, pause_s=0.038)
    assert " · noticed in 2.0 ms · " in told.sentences[0] and "longest pause 38 ms" in told.sentences[0]


def test_an_attention_worker_dies_by_itself(told: Told) -> None:
    """The gateway may see the end of its channel first."""
    for number in range(4):
        parted = {"request_id": str(number), "from_rank": 1, "to_rank": 0, "num_known": 5}
        told.happens(ev.RequestResumed, 100.0, **parted, stalled_s=0.0)
    assert told.sentences == ["attention worker 1 is lost · 4 streams moved to worker 0"]
    told.detect(1, 100.002)
    told.happens(ev.WorkerExitedEvent, 100.003, rank=1, incarnation=1, exit_status=-11)
    restored = {"rank": 0, "request_id": "0", "from_rank": 1, "num_restored": 512, "num_recomputed": 0}
    told.happens(ev.StreamRestored, 100.02, **restored, took_ms=0.3)
    told.ticks(100.25, pause_s=0.031)
    told.ready(1, 100.94)
    assert told.sentences == [
        "attention worker 1 died (SIGSEGV) · 4 streams moved to worker 0, 512 tokens of KV from its log · "
        "longest pause 31 ms · 0 tokens lost · replaced after 0.9 s"
    ]


def test_the_next_death_in_the_same_seat_is_another_entry(told: Told) -> None:
    for at_s, incarnation in ((100.0, 1), (101.0, 2)):
        told.kill(3, at_s, incarnation=incarnation)
        told.detect(3, at_s + 0.001, incarnation=incarnation)
        told.ready(3, at_s + 0.5, incarnation + 1)
    assert [sentence.split(" · ")[0] for sentence in told.sentences] == ["expert worker 3 died (SIGKILL)"] * 2


def test_a_suspicion_that_was_wrong(told: Told) -> None:
    told.suspect(2, 100.0, reason="silent")
    assert told.sentences == ["expert worker 2 is suspected by worker 0: silent"]
    told.ticks(100.2)
    told.ticks(104.0)
    (entry,) = told.timeline.entries()
    assert entry.sentence == "expert worker 2 was suspected for a moment: silent"
    assert entry.kind == "note" and not entry.is_open
    told.kill(2, 130.0)
    told.suspect(2, 130.001)
    told.detect(2, 130.002)
    assert told.sentences[1].startswith("expert worker 2 died (SIGKILL) · noticed in 1.0 ms")


def test_a_kill_during_a_suspicion_is_not_the_suspicion(told: Told) -> None:
    told.suspect(2, 100.0, reason="silent")
    told.kill(2, 101.0)
    told.detect(2, 101.004)
    assert len(told.sentences) == 2 and "noticed in 4.0 ms" in told.sentences[1]


def test_a_worker_that_hangs_and_wakes_up(told: Told) -> None:
    told.kill(0, 100.0, signal="STOP")
    told.detect(0, 100.06, cause="hang")
    told.ready(0, 100.5)
    told.happens(ev.StaleDropped, 103.0, rank=0, incarnation=1, count=3, what="messages")
    assert told.sentences == [
        "attention worker 0 stopped answering (SIGSTOP) · noticed in 60 ms · no stream was running · "
        "replaced after 0.5 s · 3 late messages of it dropped"
    ]


def test_streams_that_still_wait(told: Told) -> None:
    told.detect(0, 100.0)
    told.ticks(101.0, waiting_s=1.1)
    assert told.sentences[0].endswith("streams wait since 1.1 s")
    told.ready(0, 101.1)
    assert "no stream was running" not in told.sentences[0]
    told.ticks(101.3, pause_s=1.2)
    assert "longest pause 1.2 s · 0 tokens lost" in told.sentences[0]


def test_experts_without_a_place(told: Told) -> None:
    told.detect(3, 100.0)
    told.happens(ev.StreamsPaused, 100.01, rank=0, layer=1, experts=(1, 2, 3))
    assert "streams wait: 3 experts without a place" in told.sentences[0]
    told.happens(ev.StreamsContinued, 100.8, rank=0, paused_s=0.79)
    assert "streams waited 790 ms for experts without a place" in told.sentences[0]


def test_a_broken_stream_is_not_hidden(told: Told) -> None:
    told.detect(1, 100.0)
    told.ticks(100.2, pause_s=0.03)
    told.happens(ev.StreamBroke, 100.3, request_id="a", rank=1, reason="token 3 was lost")
    (entry,) = told.timeline.entries()
    assert entry.kind == "trouble" and "1 stream broke" in entry.sentence and "0 tokens lost" not in entry.sentence
    told.happens(ev.StreamBroke, 100.3, request_id="a", rank=0, reason="token 3 was lost")
    assert told.sentences[1] == "a stream of worker 0 broke: token 3 was lost"
    told.happens(ev.StreamDiverged, 100.4, request_id="a", rank=0, index=7, token=1, delivered=2)
    assert "contradicted token 7" in told.sentences[2]


def test_a_planned_move(told: Told) -> None:
    told.happens(ev.WorkerLeaving, 100.0, rank=0, incarnation=1)
    told.happens(ev.StreamMoved, 100.001, request_id="a", from_rank=0, to_rank=1, num_known=3, paused_s=0.0)
    told.ticks(100.2, pause_s=0.009)
    told.happens(ev.WorkerLeft, 100.1, rank=0, incarnation=1)
    told.ready(0, 100.6)
    (entry,) = told.timeline.entries()
    assert entry.kind == "move" and entry.sentence == (
        "attention worker 0 left · 1 stream moved to worker 1 · longest pause 9.0 ms · 0 tokens lost · "
        "replaced after 0.6 s"
    )


def test_a_seat_that_cannot_be_filled(told: Told) -> None:
    told.detect(3, 100.0, cause="exit", reason="out of memory")
    told.happens(ev.WorkerBackedOff, 101.0, rank=3, num_crashes=3, delay_s=4.0)
    assert told.sentences[0].startswith("expert worker 3 ended by itself: out of memory")
    assert told.sentences[0].endswith("ended 3 times while starting, next try in 4.0 s")


def test_the_tables_close_what_events_did_not(told: Told) -> None:
    """The orchestrator that should have passed the news on has died."""
    told.detect(3, 100.0)
    told.timeline.learn([*told.workers[:3], member(3, 2, state=WorkerState.STARTING, **SLOTS)])
    told.ticks(101.0)
    assert told.timeline.entries()[0].is_open
    told.timeline.learn([*told.workers[:3], member(3, 2, **SLOTS)])
    told.ticks(102.0)
    assert told.sentences[0].endswith("replaced after 2.0 s") and not told.timeline.entries()[0].is_open


def test_the_orchestrator_dies(told: Told) -> None:
    told.happens(ev.ProcessEnded, 100.0, child="orchestrator", exit_status=-9)
    told.happens(ev.ProcessStarted, 100.2, child="orchestrator", child_pid=7)
    assert told.timeline.entries()[0].is_open, "a process is not yet one that knows something"
    recovered = {"epoch": 12, "num_reports": 4, "num_missing": 0, "took_s": 0.3}
    told.happens(ev.OrchestratorRecovered, 100.6, **recovered)
    told.ticks(100.7, pause_s=0.012)
    assert told.sentences == [
        "the orchestrator died (SIGKILL) · a new one started after 200 ms · "
        "took over at epoch 12 after 0.6 s, 4 workers reported · longest pause 12 ms · 0 tokens lost"
    ]


def test_the_start_and_small_news(told: Told) -> None:
    placement = {"num_expert_workers": 2, "active_per_worker": 32, "shadow_per_worker": 32, "survivable_deaths": 1}
    told.happens(ev.PlacementMade, 90.0, **placement)
    told.happens(ev.Serving, 91.0, url="http://x")
    told.ready(0, 91.0, incarnation=1)
    for at_s in (92.0, 93.0, 99.0):
        told.happens(ev.RequestPreempted, at_s, rank=0, request_id="a", num_tokens=3)
    assert told.sentences == [
        "serving at http://x · 2 attention workers and 2 expert workers · "
        "any one expert worker may die without a pause",
        "2 streams gave KV blocks back: worker 0 has no more",
        "1 stream gave KV blocks back: worker 0 has no more",
    ]


def test_moves_for_load_are_told_and_refusals_are_not(told: Told) -> None:
    figures = {"max_over_mean": 1.7, "expected": 1.1, "num_moves": 2, "goal": 3}
    told.happens(ev.BalanceDecided, 90.0, is_accepted=False, reason="balanced", **figures)
    told.happens(ev.BalanceDecided, 95.0, is_accepted=True, reason="max/mean 1.70 -> 1.10", **figures)
    assert told.sentences == ["experts move because of their load: max/mean 1.70 -> 1.10"]


def test_only_what_changed_is_told_again(told: Told) -> None:
    told.detect(3, 100.0)
    told.detect(2, 100.0)
    version = told.timeline.version
    assert told.timeline.entries(version) == []
    told.ready(2, 101.0)
    assert [entry.who for entry in told.timeline.entries(version)] == ["expert worker 2"]
    told.ready(3, 101.0)
    version = told.timeline.version
    for tick in range(20):
        told.ticks(102.0 + tick)
    assert told.timeline.version == version, "nothing happens, so nothing is said"


def test_the_timeline_is_bounded(told: Told) -> None:
    for number in range(1000):
        told.kill(number % 4, 100.0 + number, incarnation=1 + number)
        told.detect(number % 4, 100.001 + number, incarnation=1 + number)
    assert len(told.timeline.entries()) == 100
    assert len(told.timeline.sentences(5)) == 5 and told.timeline._unpublished.maxlen is not None


def test_the_pause_is_looked_for_from_the_first_sign_to_the_last_effect(told: Told) -> None:
    asked = []
    told.kill(1, 100.0)
    told.detect(1, 100.004)
    parted = {"request_id": "a", "from_rank": 1, "to_rank": 0, "num_known": 5, "stalled_s": 0.0}
    told.happens(ev.RequestResumed, 100.006, **parted)
    told.timeline.measure(100.2, lambda from_s, to_s: asked.append((from_s, to_s)), 0.0)
    assert asked == [(100.0, 100.006)]
