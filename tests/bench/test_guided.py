"""`bench guided`: what it asks for, and what it makes of answers."""

import json

import pytest

from everserve.client import Stream
from everserve_bench import guided


def stream(started_s: float, first_s: float, num: int, gap_s: float) -> Stream:
    arrivals = [first_s + i * gap_s for i in range(num)]
    return Stream(started_s=started_s, arrivals_s=arrivals, token_ids=[1] * num)


def test_a_sample() -> None:
    found = guided.sample_of([stream(1.0, 1.5, 5, 0.01), stream(1.0, 1.2, 5, 0.02), stream(1.0, 1.2, 5, 0.04)], 0.3)
    assert found.first_ms == pytest.approx(500) and found.itl_ms == pytest.approx(10)
    assert found.others_itl_ms == pytest.approx(30) and found.cpu_ms == pytest.approx(20)


def test_ratios_are_of_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    def samples(factor: float) -> list[guided.Sample]:
        return [guided.Sample(first_ms=1.0, itl_ms=factor * n, others_itl_ms=n, cpu_ms=2 * n) for n in (1, 5, 100)]

    found = guided.compare(samples(1.5), samples(1.0))
    assert found["itl"] == {"median": 1.5, "min": 1.5, "max": 1.5} and found["others_itl"]["max"] == 1.0
    spread = {"median": 7.0, "min": 1.0, "max": 9.0}
    guided.show({"guided_to_unguided": {"alone": found}, "first_token_ms": {"new schema": spread}})
    shown = capsys.readouterr().out
    assert "1.500" in shown and "new schema" in shown and "7.0" in shown


def test_a_round_on_a_real_server(server) -> None:
    settings = guided.Settings(rounds=1, tokens=16, neighbours=2)
    found = json.loads(json.dumps(guided.measure(server, settings)))
    assert set(found["samples"]) == {f"{kind}, {where}" for kind in ("guided", "unguided") for where in guided.WHERE}
    assert set(found["guided_to_unguided"]["beside others"]) == {"itl", "others_itl", "cpu"}
    assert set(found["first_token_ms"]) == {"unguided", "new schema", "same schema"}
