"""What the failover and overhead benchmarks make of arrival times and events."""

import dataclasses
import json
import os
import random
import statistics
import sys
import time

import pytest

from everserve.errors import EverserveError
from everserve_bench import analysis, incident, kill_phases, kill_rounds, plot, processes, report, runner
from everserve_bench.analysis import Verdict
from everserve_bench.incident import Incident, Victim
from everserve_bench.load import make_asks
from everserve_bench.scenarios.failover import Failover
from everserve_bench.scenarios.overhead import ALL_OFF, REFERENCE, Overhead
from everserve_bench.variants import Slice


def every(step_s: float, begin_s: float, end_s: float) -> list[float]:
    num = round((end_s - begin_s) / step_s)
    return [begin_s + i * step_s for i in range(num + 1)]


# -- comparing streams ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "num_lost", "num_different"),
    [
        ([1, 2, 3], 0, 0),
        ([1, 2], 1, 0),
        ([], 3, 0),
        ([1, 9, 3], 0, 1),
        ([2, 3], 1, 2),  # one lost in the middle moves all others
        ([1, 2, 3, 3], 0, 1),  # one twice
        ([1, 2, 2, 3], 0, 2),
    ],
)
def test_compare(token_ids, num_lost, num_different):
    verdict = analysis.compare(token_ids, [1, 2, 3])
    assert (verdict.num_tokens, verdict.num_lost, verdict.num_different) == (len(token_ids), num_lost, num_different)
    assert verdict.is_exact == (token_ids == [1, 2, 3])


def test_asks_are_the_same_every_time_and_all_different():
    asks = make_asks(8, num_prompt=32, max_tokens=100, vocab_size=4096)
    assert asks == make_asks(8, num_prompt=32, max_tokens=100, vocab_size=4096)
    assert len({tuple(ask.prompt) for ask in asks}) == 8
    seeds = [ask.params["seed"] for ask in asks if ask.params]
    assert len(seeds) == len(set(seeds)) == 4  # half sampled, half greedy


# -- gaps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at_s", "within_s", "expected"),
    [
        (2.5, 0.0, 1.0),  # spans: 2 -> 3
        (4.5, 0.0, 5.0),  # spans: 4 -> 9
        (2.5, 1.0, 1.0),  # 3 -> 4 begins in time; 4 -> 9 does not
        (2.5, 1.5, 5.0),  # begins at the last moment
        (9.5, 1.0, 1.0),
        (2.0, 0.5, 1.0),  # a token at the very moment is one before it
        (-5.0, 1.0, None),  # the stream began long after
        (11.0, 1.0, None),  # it had ended
    ],
)
def test_largest_gap(at_s, within_s, expected):
    assert analysis.largest_gap([1, 2, 3, 4, 9, 10], at_s, within_s) == expected


def test_a_gap_before_does_not_count():
    assert analysis.largest_gap([0, 7, 8, 9], at_s=7.5, within_s=10) == 1


@pytest.mark.parametrize("arrivals", [[], [1.0]])
def test_no_gap_without_two_tokens(arrivals):
    assert analysis.largest_gap(arrivals, 0.5, 10) is None
    assert analysis.gaps_between(arrivals, 0, 10) == []


def test_gaps_between_leaves_out_what_spans_the_ends():
    assert analysis.gaps_between([0, 1, 3, 6, 10], 1, 6) == [2, 3]


def test_replayed_tokens_are_no_news():
    news = analysis.with_replay([1.0, 2.0, 3.0], [20.0, 21.0, 22.0, 23.0, 24.0])
    assert news == [1.0, 2.0, 3.0, 23.0, 24.0]
    assert analysis.largest_gap(news, at_s=3.1, within_s=1.0) == 20.0


def test_the_gap_of_a_restart_counts_from_the_last_token_that_came():
    """Some arrive after the kill: they were on their way."""
    news = analysis.with_replay([1.0, 2.0, 3.0], [20.0, 21.0, 22.0, 23.0])
    assert analysis.largest_gap(news, at_s=2.5, within_s=1.0) == 20.0


def test_a_stream_that_broke_before_its_first_token():
    assert analysis.with_replay([], [20.0, 21.0]) == [20.0, 21.0]


# -- over time -----------------------------------------------------------------------------------


def test_series_counts_every_token_once():
    generator = random.Random(1)
    streams = [sorted(100 + generator.uniform(-1, 2) for _ in range(500)) for _ in range(8)]
    found = analysis.series(streams, origin_s=100, begin_s=-1, end_s=2, width_s=0.05)
    assert len(found.tokens_per_s) == len(found.largest_gap_ms) == 60
    assert sum(found.tokens_per_s) * 0.05 == pytest.approx(8 * 500)


def test_series_puts_tokens_and_gaps_where_they_arrived():
    found = analysis.series([[9.5, 10.25, 10.75, 12.5], [10.5]], origin_s=10, begin_s=-1, end_s=3, width_s=1)
    assert found.tokens_per_s == [1, 3, 0, 1]
    assert found.largest_gap_ms == [0, 750, 0, 1750]


def test_series_leaves_out_what_lies_outside():
    found = analysis.series([[8.0, 10.5, 20.0]], origin_s=10, begin_s=0, end_s=1, width_s=0.5)
    assert found.tokens_per_s == [0, 2]
    assert found.largest_gap_ms == [0, 2500]  # its beginning lies outside, its end does not


def test_steady_is_where_all_streams_run():
    steady = analysis.steady([every(0.1, 0, 2), every(0.1, 1, 3)])
    assert steady.tokens_per_s == pytest.approx(20)
    assert len(steady.gaps_s) == 20 and steady.gaps_s == pytest.approx([0.1] * 20)


def test_steady_needs_streams_that_overlap():
    with pytest.raises(ValueError, match="too short"):
        analysis.steady([[0, 1], [2, 3]])


# -- over rounds ---------------------------------------------------------------------------------


def test_ratios_cancel_what_slows_both():
    assert analysis.ratios([100, 50, 10], [200, 100, 20]) == [0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match="argument"):
        analysis.ratios([1, 2], [1])


@pytest.mark.parametrize(("n", "left_out"), [(1, 0), (5, 0), (6, 0), (9, 1), (12, 2), (15, 3), (20, 5)])
def test_median_interval_against_the_tables(n, left_out):
    """Order statistics of the sign test at 95 %, as in any table of it."""
    assert analysis.median_interval([*range(n)]) == (left_out, n - 1 - left_out)


def test_median_interval_holds_the_true_median_as_often_as_it_says():
    generator = random.Random(2)
    intervals = [analysis.median_interval([generator.gauss(0, 1) for _ in range(15)]) for _ in range(2000)]
    assert 0.95 <= statistics.mean(low <= 0 <= high for low, high in intervals) <= 0.98


def test_median_index():
    assert analysis.median_index([5.0, 1.0, 9.0]) == 0
    assert analysis.median_index([4.0, 1.0, 9.0, 7.0]) == 0  # of two the lower
    assert analysis.median_index([3.0]) == 0


# -- one kill ------------------------------------------------------------------------------------

VICTIM = Victim(rank=2, incarnation=4, pid=123, killed_s=100.0)


def event(name: str, at_s: float, **fields):
    return {"event": name, "at_s": at_s, **fields}


EVENTS = [
    event("worker_became_ready", 90.0, rank=2, incarnation=4),
    event("rows_replayed", 95.0, rank=0, suspect=2, layer=1, num_rows=1000),  # an earlier death
    event("suspected", 100.002, by=0, rank=2, incarnation=4, reason="died"),
    event("suspected", 100.001, by=1, rank=2, incarnation=4, reason="died"),
    event("fault_detected", 100.003, rank=2, incarnation=4, roles=["expert"], cause="crash", reason=""),
    event("rows_replayed", 100.004, rank=0, suspect=2, layer=3, num_rows=20),
    event("rows_replayed", 100.005, rank=1, suspect=2, layer=3, num_rows=12),
    event("rows_replayed", 100.005, rank=1, suspect=3, layer=3, num_rows=500),  # somebody else's
    event("request_resumed", 100.006, request_id="a", from_rank=2, to_rank=1, num_known=3, stalled_s=0.001),
    event("request_resumed", 100.006, request_id="b", from_rank=0, to_rank=1, num_known=3, stalled_s=0.001),
    event("worker_became_ready", 100.2, rank=1, incarnation=9),
    event("worker_became_ready", 100.5, rank=2, incarnation=5),
    event("rows_replayed", 107.0, rank=0, suspect=2, layer=3, num_rows=300),  # its successor's death
]


def test_an_incident_is_told_from_its_own_events_only():
    told = incident.tell(EVENTS, VICTIM)
    assert told.suspected_s == pytest.approx(0.001)
    assert told.detected_s == pytest.approx(0.003)
    assert told.rows_replayed == 32
    assert told.requests_resumed == 1
    assert told.ready_s == pytest.approx(0.5)
    assert told.others_lost == 0


def test_a_worker_that_nobody_killed():
    other = event("fault_detected", 100.9, rank=0, incarnation=1, roles=["attention"], cause="hang", reason="silent")
    assert incident.tell([*EVENTS, other], VICTIM).others_lost == 1


def test_a_stream_without_a_log_is_computed_again_up_to_its_last_token_but_one():
    """Prompts of 100 tokens. Stream a (3 tokens) has nothing in a log; c is restored but for 4; d had no token yet."""
    more = [
        event("request_resumed", 100.006, request_id="c", from_rank=2, to_rank=1, num_known=50, stalled_s=0.001),
        event("request_resumed", 100.006, request_id="d", from_rank=2, to_rank=1, num_known=0, stalled_s=0.001),
        event("stream_restored", 100.008, request_id="c", from_rank=2, num_restored=145, num_recomputed=4, took_ms=1.0),
    ]
    told = incident.tell([*EVENTS, *more], VICTIM, num_prompt=100)
    assert told.requests_resumed == 3
    assert told.tokens_restored == 145
    assert told.tokens_recomputed == pytest.approx((102 + 4) / 2)


def test_nobody_has_to_suspect_an_idle_worker():
    told = incident.tell([e for e in EVENTS if e["event"] != "suspected"], VICTIM)
    assert told.suspected_s is None


@pytest.mark.parametrize("missing", ["fault_detected", "worker_became_ready"])
def test_a_kill_that_did_not_land_is_an_error(missing):
    with pytest.raises(EverserveError, match="rank 2"):
        incident.tell([e for e in EVENTS if e["event"] != missing], VICTIM)


def make_round(fault: str = "expert", stall_s: float = 0.05, **changes) -> incident.Round:
    """Two streams, a token every 10 ms, that stand still for a while after the kill at 100 s; one more began later."""
    before, after = every(0.01, 95, 100), every(0.01, 100 + stall_s, 103 + stall_s)
    found = incident.judge(
        fault,
        [before + after, before + after, every(0.01, 102, 103)],
        killed_s=100.0,
        rank=2,
        verdicts=[Verdict(400, 0, 0), Verdict(400, 0, 0)],
        end_s=103.0,
        whole_s=100.6,
        stolen=0.01,
        warm_s=3.0,
        told=None if fault == "restart" else Incident(0.001, 0.002, 32, 4, 2000, 1.0, 0.5, 0),
    )
    return dataclasses.replace(found, **changes)


def test_a_gap_that_begins_when_the_successor_joins_counts():
    """At full strength after 1.5 s, and streams stand still once more just before that."""
    arrivals = every(0.01, 95, 100) + every(0.01, 100.05, 101.5) + every(0.01, 101.7, 104)
    common = {"killed_s": 100.0, "rank": 0, "verdicts": [], "end_s": 104.0, "stolen": 0.0, "warm_s": 3.0, "told": None}
    assert incident.judge("attention", [arrivals], whole_s=101.55, **common).gap_ms == pytest.approx(200, abs=11)
    assert incident.judge("attention", [arrivals], whole_s=100.6, **common).gap_ms == pytest.approx(50, abs=11)


def test_phases_of_an_attention_workers_death():
    """Noticed by the gateway's socket; two streams, read after a step and copied; tokens under way arrive first."""
    resumed = {"event": "request_resumed", "from_rank": 0}
    restored = {"event": "stream_restored", "from_rank": 0}
    events = [
        {"event": "suspected", "rank": 0, "at_s": 99.0},  # an earlier death
        resumed | {"at_s": 100.002},
        {"event": "fault_detected", "rank": 0, "at_s": 100.003},
        resumed | {"at_s": 100.004},
        restored | {"at_s": 100.017, "took_ms": 2.0},
        restored | {"at_s": 100.018, "took_ms": 1.0},
        restored | {"at_s": 101.0, "took_ms": 1.0},  # a later one
    ]
    streams = [[99.99, 100.001, 100.03, 100.04], [99.99, 100.028, 100.04], [99.99, 100.005, 100.015]]
    found = kill_phases.phases_ms("attention", events, 0, 100.0, streams)
    expected = {"notice": 2.0, "give away": 2.0, "arrive": 11.0, "copy": 3.0, "step": 10.0}
    assert found == pytest.approx(expected), "up to the token at 100.028: no stream waited longer"


def test_phases_of_an_expert_workers_death():
    events = [
        {"event": "suspected", "rank": 2, "at_s": 100.001},
        {"event": "rows_replayed", "suspect": 2, "at_s": 100.002},
        {"event": "rows_replayed", "suspect": 2, "at_s": 100.0025},
    ]
    found = kill_phases.phases_ms("expert", events, 2, 100.0, [[99.99, 100.01, 100.02]])
    assert found == pytest.approx({"notice": 1.0, "send again": 1.5, "step": 7.5})
    unnoticed = kill_phases.phases_ms("expert", [], 2, 100.0, [[99.99, 100.01]])
    assert unnoticed == pytest.approx({"step": 10.0}), "no row was under way"
    assert not kill_phases.phases_ms("expert", events, 2, 100.0, [[99.0, 99.5]])


def test_a_round():
    found = make_round(stall_s=0.05)
    assert found.normal_p50_ms == pytest.approx(10)
    assert found.normal_p99_ms == pytest.approx(10)
    assert found.normal_largest_ms == pytest.approx(10)
    assert found.gaps_ms == [50, 50]  # none for the stream that began later
    assert found.gap_ms == found.gap_at_once_ms == pytest.approx(50)
    assert found.excess_ms == pytest.approx(40)
    assert found.whole_s == pytest.approx(0.6)
    assert (found.num_streams, found.num_tokens) == (2, 800)
    assert found.series.begin_s == -3 and len(found.series.tokens_per_s) == 120


def test_a_later_gap_is_the_kills_but_not_the_failovers():
    """A stall at the successor's arrival counts, and is told apart."""
    arrivals = every(0.01, 95, 100.5) + every(0.01, 100.75, 103)
    found = incident.judge(
        "expert",
        [arrivals],
        killed_s=100.0,
        rank=2,
        verdicts=[],
        end_s=103,
        whole_s=100.6,
        stolen=0,
        warm_s=3,
        told=None,
    )
    assert found.gap_ms == pytest.approx(250)
    assert found.gap_at_once_ms == pytest.approx(10)


def test_a_kill_without_streams_says_what_to_do():
    with pytest.raises(EverserveError, match="--tokens"):
        incident.judge(
            "expert", [[1.0, 2.0]], killed_s=100.0, rank=2, verdicts=[], end_s=103, whole_s=101, stolen=0, warm_s=3,
            told=None,
        )  # fmt: skip


# -- what is reported ----------------------------------------------------------------------------


def make_rounds() -> list[incident.Round]:
    stalls = {"expert": (0.02, 0.04, 0.03), "attention": (0.3, 0.2), "restart": (9.0, 12.0)}
    return [make_round(fault, stall_s) for fault, found in stalls.items() for stall_s in found]


def test_failover_summary():
    summary = kill_rounds.summarize(make_rounds())
    expert, attention = summary["faults"]["expert"], summary["faults"]["attention"]
    assert expert["rounds"] == 3 and expert["shown_round"] == 2
    assert expert["gap_ms"]["median"] == pytest.approx(30) and expert["gap_ms"]["max"] == pytest.approx(40)
    assert expert["restart_is_longer"] == pytest.approx(10.5 / 0.03)
    assert expert["restart_is_longer_worst"] == pytest.approx(9.0 / 0.04)
    assert attention["restart_is_longer"] == pytest.approx(10.5 / 0.25)
    assert summary["is_exact"] and summary["num_tokens_compared"] == 7 * 800


@pytest.mark.parametrize("wrong", [{"num_lost": 1}, {"num_different": 1}])
def test_one_token_makes_the_benchmark_fail(wrong):
    rounds = make_rounds()
    rounds[3] = dataclasses.replace(rounds[3], **wrong)
    assert not kill_rounds.summarize(rounds)["is_exact"]


@pytest.mark.parametrize(("shape", "is_passed"), [("bundled", True), ("mixtral", False)])
def test_a_harmed_survivor_makes_it_fail_on_a_gpu(shape, is_passed, tmp_path, capsys):
    rounds = make_rounds()
    told = rounds[0].incident
    rounds[0] = dataclasses.replace(rounds[0], incident=dataclasses.replace(told, others_lost=2))
    result = make_result(shape) | kill_rounds.summarize(rounds)
    assert result["others_lost"] == result["faults"]["expert"]["others_lost"] == 2
    assert Failover.is_passed(result) == is_passed
    runner.show(Failover, result, tmp_path / "failover.json", None)
    shown = capsys.readouterr().out
    assert "2 workers were declared gone although they were not killed" in shown
    assert ("FAILED" in shown) == (not is_passed)


def make_result(shape: str = "bundled") -> dict:
    rounds = make_rounds()
    settings = {"num_streams": 2, "num_attention": 2, "num_expert": 2, "rounds": 3, "baseline_rounds": 2}
    return {
        "model": "a model",
        "settings": settings | {"shape": shape},
        **kill_rounds.summarize(rounds),
        "rounds": [dataclasses.asdict(round_) for round_ in rounds],
    }


def test_failover_tables(tmp_path, capsys):
    runner.show(Failover, make_result(), tmp_path / "failover.json", None)
    shown = capsys.readouterr().out
    assert "350x longer" in shown and "0 lost, 0 different: every stream is exact" in shown
    assert "everserve[bench]" in shown and "5 kills: no survivor was harmed" in shown


def test_failover_tables_without_a_baseline(tmp_path, capsys):
    other = Incident(None, 0.002, 0, 4, 0, 0.0, 0.5, others_lost=1)
    rounds = [make_round("expert"), make_round("attention", gap_at_once_ms=None, num_lost=3, incident=other)]
    result = make_result() | kill_rounds.summarize(rounds)
    runner.show(Failover, result, tmp_path / "failover.json", tmp_path / "failover.png")
    shown = capsys.readouterr().out
    assert "FAILED" in shown and "3 lost" in shown and "longer" not in shown
    assert "1 workers were declared gone although they were not killed" in shown


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = plot.write(make_result(), tmp_path / "failover.png")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


def test_no_plot_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert plot.write(make_result(), tmp_path / "failover.png") is None
    assert not list(tmp_path.iterdir())


def make_slice(tokens_per_s: float) -> Slice:
    step_ms = 1e3 / tokens_per_s
    return Slice(
        tokens_per_s=tokens_per_s, itl_p50_ms=step_ms, itl_p99_ms=2 * step_ms, cpu_ms_per_token=step_ms, stolen=0.0
    )


def test_overhead_summary_compares_within_rounds(tmp_path, capsys):
    """The machine gets twice as slow from round to round; the ratios do not notice."""
    speeds = [800.0, 400.0, 200.0]
    samples = {
        ("one process", 8): [make_slice(1.5 * speed) for speed in speeds],
        (REFERENCE, 8): [make_slice(speed) for speed in speeds],
        (ALL_OFF, 8): [make_slice(speed / 0.98) for speed in speeds],
    }
    summary = Overhead.summarize(samples)
    rows = {row["variant"]: row for row in summary["variants"]}
    assert rows["one process"]["tokens_per_s_to_2+2"] == pytest.approx({"median": 1.5, "low": 1.5, "high": 1.5})
    assert rows["one process"]["tokens_per_s"] == {"median": 600, "min": 300, "max": 1200}
    (cost,) = summary["protections"]
    assert cost["tokens_per_s"]["median"] == pytest.approx(0.98)
    assert cost["itl_p50_ms"]["median"] == pytest.approx(1 / 0.98)
    settings = {"streams": [8], "prompt": 32, "max_tokens": 192, "rounds": 3}
    repeated = {REFERENCE: 2, ALL_OFF: 0}
    result = {"settings": settings, "idle_cores": {}, "num_different": 0, "num_repeated": repeated, **summary}
    runner.show(Overhead, result, tmp_path / "overhead.json", None)
    shown = capsys.readouterr().out
    assert "tokens/s 0.980 (0.980-0.980)" in shown
    assert "without any fault: {'2+2': 2}" in shown


def test_overhead_without_the_variant_that_has_all_off():
    assert Overhead.summarize({(REFERENCE, 1): [make_slice(100)]})["protections"] == []


def test_lists_of_numbers_stand_on_one_line(tmp_path):
    result = {"rounds": [{"series": [1.5, -2, 3e-07], "none": [], "gaps": {"a": 1}}], "names": ["1, 2", "[3]"]}
    text = report.write("x", result, tmp_path).read_text()
    assert '"series": [ 1.5, -2, 3e-07 ],\n' in text
    assert {key: json.loads(text)[key] for key in result} == result


# -- a server from outside -----------------------------------------------------------------------

READY = {"rank": 0, "state": "ready", "pid": 11}
VIEW = {"violations": [], "degraded": [], "workers": [READY], "processes": [{"name": "gateway", "pid": 10}]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"violations": ["x"]}, False),
        ({"degraded": ["x"]}, False),
        ({"workers": [READY, {"rank": 1, "state": "loading", "pid": 0}]}, False),
        ({"workers": []}, False),
    ],
)
def test_whole(change, expected):
    assert processes.is_whole(VIEW | change) == expected


def test_pids_leave_out_seats_without_a_process():
    assert processes.pids(VIEW | {"workers": [READY, {"rank": 1, "state": "starting", "pid": None}]}) == [10, 11]


def test_core_time_is_this_processs_own():
    before, deadline = processes.cpu_s([os.getpid()]), time.process_time() + 0.05
    while time.process_time() < deadline:
        pass
    assert processes.cpu_s([os.getpid()]) - before >= 0.04


def test_where_a_stream_goes_wrong():
    assert analysis.first_difference([1, 2, 3], [1, 2, 3, 4]) is None
    assert analysis.first_difference([1, 9, 8], [1, 2, 3]) == 1
