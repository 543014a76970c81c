"""What `bench scale` concludes from arrival times, and how it shows it."""

from dataclasses import asdict
from pathlib import Path

import pytest

from everserve_bench import analysis, runner
from everserve_bench.scenarios.scale import Change, Scale, _changes

SETTINGS = Scale(sizes=(2, 4, 3), num_streams=2, max_tokens=100, stay_s=1.0)


def arrivals(*gaps_ms: float) -> list[float]:
    times = [100.0]
    for gap in gaps_ms:
        times.append(times[-1] + gap / 1e3)
    return times


def found() -> tuple[list[Change], dict]:
    calm, disturbed = [10.0] * 400, [10.0] * 120 + [250.0] + [10.0] * 180 + [40.0] + [10.0] * 50
    streams = [arrivals(*calm), arrivals(*disturbed)]
    changes = _changes(SETTINGS.sizes, SETTINGS.stay_s, streams, 100.0, [(101.0, 101.5), (103.0, 103.4)])
    result = {"model": "m", "settings": SETTINGS.told(), "changes": [asdict(one) for one in changes]}
    result["series"] = asdict(analysis.series(streams, 100.0, 0.0, 4.0, 0.25))
    return changes, result | {"num_streams": 2, "num_tokens": 700, "num_wrong": 0, "errors": []}


def test_a_gap_belongs_to_the_change_that_it_is_in():
    first, second = found()[0]
    assert (first.devices_before, first.devices, second.devices) == (2, 4, 3)
    assert (first.asked_s, first.took_s) == (1.0, 0.5)
    assert first.largest_gap_ms == pytest.approx(250.0) and first.gaps_before_ms == pytest.approx([10.0] * 3)
    assert second.largest_gap_ms == pytest.approx(40.0), "not the one of the change before"
    assert first.tokens_per_s_before == pytest.approx(200, abs=3)


def test_the_table(capsys):
    _, result = found()
    runner.show(Scale, result, Path("scale.json"), None)
    text = capsys.readouterr().out
    assert "2 -> 4" in text and "250.0 ms" in text and "all exact" in text and "tokens/s over time: " in text
    assert Scale.is_passed(result)
    broken = {**result, "num_wrong": 1, "errors": ["it broke"]}
    assert not Scale.is_passed(broken)
    runner.show(Scale, broken, Path("scale.json"), None)
    text = capsys.readouterr().out
    assert "1 NOT EXACT" in text and "error: it broke" in text
