"""Which losses the repair benchmark measures, and what it makes of events and arrival times."""

import dataclasses
import json

import pytest

from everserve.errors import ConfigError, EverserveError
from everserve.plan.placement import place_experts, survivable_deaths
from everserve.progress import Progress
from everserve_bench import analysis, repair_cases, repaired, report, show
from everserve_bench.analysis import Verdict
from everserve_bench.repair_cases import Case, choose, devices_to_lose
from everserve_bench.repaired import Repair, Times
from everserve_bench.scenarios import repair
from everserve_bench.subject import Subject, subject
from tests.bench.test_analysis import event, every, make_round

LARGE = Subject("large", "/some/directory", 32000, 32768, ("--device", "cuda", "--load-format", "dummy"), 8)

# -- cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_experts", "num_devices"), [(64, 8), (64, 4), (128, 8), (10, 4)])
def test_enough_shadows_survive_the_loss_and_few_leave_room_for_its_repair(num_experts, num_devices):
    cases, missing = choose(num_experts, num_devices, [1, 2])
    assert cases
    for case in cases:
        placement = place_experts(num_experts, [0], range(num_devices), case.num_shadows)
        survives = survivable_deaths(placement) >= case.num_lost
        assert survives == (case.shadows == "enough"), case
        room = (num_devices - case.num_lost) * placement.num_slots
        assert room >= num_experts, case
        if case.shadows == "few":
            assert room - (num_devices - case.num_lost) < num_experts, f"{case}: fewer would do"
    assert all(case.shadows == "few" for case in missing)


def test_where_the_fewest_shadows_are_enough_there_is_no_case_with_few():
    """Eight experts on eight devices: to have room for the lost one, each needs a second slot."""
    cases, missing = choose(8, 8, [1, 4])
    assert {str(case) for case in missing} == {"1-processes-few", "1-device-few", "1-gone-few"}
    assert {case.num_shadows for case in cases} == {1, 4}


def test_without_a_case_that_exists_nothing_is_started():
    few = make_settings(num_devices=2, cases=("gone-few",))
    with subject() as bundled, pytest.raises(ConfigError, match="shadows possible are enough in 1-gone-few"):
        next(few.measure(bundled, Progress()))


def test_cases_of_one_server_are_together():
    cases, _ = choose(64, 8, [1, 2, 4])
    assert len(cases) == 3 * len(repair_cases.FAULTS) * len(repair_cases.SHADOWS)
    assert [case.num_shadows for case in cases] == sorted(case.num_shadows for case in cases)


@pytest.mark.parametrize(
    ("patterns", "num"),
    [((), 12), (("gone",), 4), (("gone-few",), 2), (("2-gone-few",), 1), (("few-gone",), 2), (("1-device", "few"), 7)],
)
def test_cases_are_chosen_by_parts_of_their_names(patterns, num):
    cases, _ = choose(64, 8, [1, 2], patterns)
    assert len(cases) == num
    assert not patterns or all(any(case.is_meant_by(pattern) for pattern in patterns) for case in cases)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((64, 8, [8]), "--lost 8"),
        ((64, 8, [1], ("lost",)), "--case lost"),
        ((0, 8, [1]), "0 experts"),
        ((4, 8, [1]), "4 experts"),
    ],
)
def test_cases_that_cannot_be(arguments, says):
    with pytest.raises(ConfigError, match=says):
        choose(*arguments)


def test_other_devices_in_each_round():
    assert [devices_to_lose(i, 2, 8) for i in range(5)] == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]
    assert devices_to_lose(1, 3, 4) == [3, 0, 1]


def make_settings(**changes) -> repair.Repair:
    given = {"num_devices": 8, "lost": (1,), "num_streams": 8, "max_tokens": 1500, "rounds": 2, "baseline_rounds": 1}
    return repair.Repair(**(given | {"warm_s": 3.0} | changes))


def test_what_servers_are_told():
    with subject() as bundled:
        flags = make_settings(serve=("--detect-ms", "100")).flags(bundled, 6)
    assert bundled.num_experts == 64
    assert " ".join(flags).endswith(
        "--devices 8 --shadow-experts 6 --enable-chaos --weights memory --map-experts on --detect-ms 100"
    )
    assert make_settings(num_streams=64).flags(LARGE, 1)[:4] == LARGE.flags


# -- one loss ------------------------------------------------------------------------------------

LOST = {0: 1, 4: 2}  # rank: incarnation


def phase(name: str, at_s: float, num_without_place: int = 0) -> dict:
    return event("repair_phase", at_s, phase=name, since_s=0.0, num_experts_without_place=num_without_place)


EVENTS = [
    phase("covered", 95.0),  # of an earlier loss
    phase("redundant", 95.1),
    event("fault_detected", 100.002, rank=0, incarnation=1),
    event("fault_detected", 100.004, rank=4, incarnation=2),
    phase("planned", 100.005, 60),
    phase("covered", 100.006),  # of the first of two devices; then the second was declared gone
    phase("first slot", 100.010, 52),
    event("slots_filled", 100.011, rank=5, source="peer", num_bytes=100, seconds=0.001),
    event("slots_filled", 100.012, filled=[{"source": "file", "num_bytes": 7}, {"source": "peer", "num_bytes": 1}]),
    phase("covered", 100.05),
    event("streams_continued", 100.06, rank=1, paused_s=0.04),
    event("streams_continued", 100.07, rank=2, paused_s=0.05),
    phase("redundant", 100.3),
    event("experts_moved", 100.013, rank=5, source="mapped", num_bytes=0, num_experts=12),
    event("slots_filled", 103.5, rank=4, source="peer", num_bytes=5000),  # after the return
    phase("covered", 104.0),
]  # fmt: skip


def test_a_repair_is_told_from_its_own_events_only():
    told = repaired.tell(EVENTS, LOST, lost_s=100.0, until_s=103.0)
    assert (told.detected_s, told.covered_s, told.redundant_s) == pytest.approx((0.004, 0.05, 0.3))
    assert (told.planned_s, told.first_slot_s) == pytest.approx((0.005, 0.010))
    assert told.num_without_place == 60 and told.paused_s == 0.05 and told.others_lost == 0
    assert told.bytes_by_source == {"file": 7, "mapped": 0, "peer": 101}
    assert told.experts_by_source == {"mapped": 12}


def test_a_server_that_does_not_tell_where_weights_come_from():
    events = [one for one in EVENTS if one["event"] not in ("slots_filled", "experts_moved")]
    assert repaired.tell(events, LOST, 100.0, 103.0).bytes_by_source == {}


def test_a_worker_that_was_on_no_lost_device():
    other = event("fault_detected", 100.9, rank=2, incarnation=1)
    assert repaired.tell([*EVENTS, other], LOST, 100.0, 103.0).others_lost == 1


@pytest.mark.parametrize(
    ("missing", "says"), [("fault_detected", r"ranks \[0, 4\]"), ("repair_phase", "was not repaired")]
)
def test_a_loss_that_did_not_happen_or_was_not_repaired(missing, says):
    with pytest.raises(EverserveError, match=says):
        repaired.tell([one for one in EVENTS if one["event"] != missing], LOST, 100.0, 103.0)


@pytest.mark.parametrize(("num_events", "is_complete"), [(2, False), (5, False), (12, False), (13, True)])
def test_when_a_repair_is_complete(num_events, is_complete):
    assert repaired.is_complete(EVENTS[:num_events], LOST, lost_s=100.0) == is_complete


REPAIR = Repair(0.004, 60, 0.005, 0.01, 0.05, 0.3, 0.05, {"peer": 3_000_000}, 0)
GONE = Case(1, "gone", "few", 2)


def make_loss(case: Case = GONE, stall_s: float = 0.05, **changes) -> repaired.Round:
    """Two streams, a token every 10 ms, that stand still after the loss at 100 s, and for 30 ms after a return at 103
    s."""
    before, after = every(0.01, 95, 100), every(0.01, 100 + stall_s, 103)
    arrivals = before + after + every(0.01, 103.03, 107)
    returned_s = 103.0 if case.fault == "gone" else None
    found = repaired.judge(
        case,
        [0],
        [arrivals, arrivals],
        times=Times(lost_s=100.0, settled_s=100.3, returned_s=returned_s, whole_s=104.0, end_s=107.0),
        verdicts=[Verdict(400, 0, 0), Verdict(400, 0, 0)],
        stolen=0.01,
        warm_s=3.0,
        repair=REPAIR,
    )
    return dataclasses.replace(found, **changes)


def test_a_loss_and_a_return():
    found = make_loss(stall_s=0.2)
    assert found.case == "1-gone-few" and found.num_shadows == 2
    assert found.normal_p50_ms == pytest.approx(10) and found.gap_ms == pytest.approx(200)
    assert found.excess_ms == pytest.approx(190) and found.return_gap_ms == pytest.approx(30)
    assert found.whole_s == pytest.approx(1.0), "since the return"
    assert found.tokens_per_s_before == pytest.approx(200, rel=0.01)
    assert found.tokens_per_s_during == pytest.approx(160, rel=0.02), "of the second after the loss"
    assert found.tokens_per_s_after == pytest.approx(200, rel=0.01)
    assert found.tokens_per_s_returned == pytest.approx(200, rel=0.01)


def test_a_device_that_returns_by_itself():
    found = make_loss(Case(1, "device", "few", 2))
    assert found.return_gap_ms is None and found.tokens_per_s_returned is None
    assert found.whole_s == pytest.approx(4.0), "since the loss"


def test_a_loss_without_streams_says_what_to_do():
    times = Times(lost_s=100.0, settled_s=100.3, returned_s=None, whole_s=104.0, end_s=107.0)
    with pytest.raises(EverserveError, match="--tokens"):
        repaired.judge(
            GONE, [0], [[1.0, 2.0]], times=times, verdicts=[], stolen=0, warm_s=3, repair=REPAIR
        )  # fmt: skip


def test_rate():
    assert analysis.rate([[1, 2, 3, 4], [2.5]], 1, 3) == 1.5


# -- what is reported ----------------------------------------------------------------------------


def make_result(rounds, failures=(), shape: str = "bundled") -> dict:
    settings = make_settings(shape=shape).told()
    summary = repair.summarize(rounds, [make_round("restart", 9.0)], failures)
    return {"model": "bundled model", "settings": settings, "left_out": ["1-device-few"], **summary}


def test_what_is_shown(tmp_path, capsys):
    rounds = [make_loss(stall_s=0.05), make_loss(stall_s=0.07), make_loss(Case(1, "device", "enough", 8))]
    result = make_result(rounds, [("2-gone-few", "the loss is not repaired")])
    assert result["cases"]["1-gone-few"]["restart_is_longer"] == pytest.approx(9 / 0.06)
    path = report.write("repair", result, tmp_path)
    show.show([path], is_markdown=True)
    shown = capsys.readouterr().out
    assert "| 1-gone-few | 60.0 (70.0) |" in shown and "| 150x longer |" in shown
    assert "| peer 3 |" in shown and "restart (baseline) | 9000 (9000)" in shown
    assert "2-gone-few: FAILED: the loss is not repaired" in shown and "left out" in shown
    assert "every stream is exact" in shown
    assert json.loads(path.read_text())["environment"]["commit"] is not None


@pytest.mark.parametrize(
    ("changes", "shape", "is_passed"),
    [
        ({}, "bundled", True),
        ({"num_missing": 1}, "bundled", False),
        ({"num_different": 1}, "bundled", False),
        ({"repair": dataclasses.replace(REPAIR, others_lost=1)}, "bundled", True),
        ({"repair": dataclasses.replace(REPAIR, others_lost=1)}, "mixtral", False),
    ],
)
def test_what_makes_it_fail(changes, shape, is_passed):
    assert repair.Repair.is_passed(make_result([make_loss(**changes)], shape=shape)) == is_passed
    assert not repair.Repair.is_passed(make_result([make_loss()], [("1-gone-few", "why")]))
