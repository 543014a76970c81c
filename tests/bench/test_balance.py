"""`everserve bench balance`, apart from its servers: stretches of time, figures, the table."""

import pytest

from everserve_bench import balance, balance_report
from everserve_bench.analysis import Verdict
from everserve_bench.balance import Look, Run, Settings


def run_of(rate: float, ratio: float, decisions: list[dict], exact: bool = True) -> Run:
    """Two streams for 20 s at this rate each; max/mean falls to 1 when something was accepted."""
    accepted = [decision["at_s"] for decision in decisions if decision["is_accepted"]]
    looks = [
        Look(100.0 + s, 1.0 if accepted and 100 + s > accepted[0] + 1 else ratio, int(100 + s == 108), 0.7)
        for s in range(20)
    ]
    arrivals = [[100.0 + i / rate for i in range(int(20 * rate))] for _ in range(2)]
    verdicts = [Verdict(10, 0, 0 if exact else 1)] * 2
    return Run(100.0, 120.0, looks, decisions, arrivals, verdicts)


def decision(at_s: float, is_accepted: bool = True) -> dict:
    figures = {"max_over_mean": 2.0, "expected": 1.1, "num_moves": 3, "reason": "because"}
    return {"at_s": at_s, "is_accepted": is_accepted, **figures}


def test_both_servers_are_measured_in_the_same_stretches(capsys, tmp_path):
    rounds = [balance._compare(run_of(50, 2.0, [decision(105.0), decision(110.0, False)]), run_of(40, 2.0, []))]
    phases = rounds[0]["phases"]
    for name in ("balanced", "not balanced"):
        assert [(p["begin_s"], p["seconds"]) for p in phases[name].values()] == [(0, 5), (5, 4), (9, 11)]
    assert phases["balanced"]["after"]["tokens_per_s"] == pytest.approx(100, rel=0.02)
    assert phases["not balanced"]["after"]["max_over_mean"] == 2.0
    assert phases["balanced"]["after"]["max_over_mean"] == 1.0 < phases["balanced"]["before"]["max_over_mean"]
    assert phases["balanced"]["during"]["largest_ms"] == pytest.approx(20, abs=0.1)
    result = {"model": "m", "settings": {**vars(Settings())}, **balance_report.summarize(rounds)}
    assert result["ratio_before"] == pytest.approx(1.25, rel=0.02), "these two differ for another reason"
    assert result["ratio_after"] == pytest.approx(1.25, rel=0.02) and balance_report.is_passed(result)
    balance_report.show(result, tmp_path / "balance.json")
    shown = capsys.readouterr().out
    assert "gets 70% of its rows" in shown and "accepted: because" in shown and "refused: because" in shown
    assert "1.25 before the moves (1 but for noise), 1.25 after: a change by 1.00" in " ".join(shown.split())


def test_a_different_token_or_no_move_is_a_failure():
    idle = balance_report.summarize([balance._compare(run_of(50, 2.0, []), run_of(50, 2.0, []))])
    assert not balance_report.is_passed(idle) and list(idle["phases"]["balanced"]) == ["before"]
    wrong = balance._compare(run_of(50, 2.0, [decision(105.0)], exact=False), run_of(50, 2.0, []))
    assert not balance_report.is_passed(balance_report.summarize([wrong]))


def test_how_skewed_traffic_is():
    assert balance.hot_share([[1.0] * 16, [0.0] * 16]) == pytest.approx(1 / 8)
    assert balance.hot_share([[0.0] * 14 + [5.0, 5.0]]) == 1.0
    assert balance.hot_share([[0.0] * 16]) is None


def test_streams_are_made_of_few_tokens():
    asks = balance.make_asks(Settings(num_streams=5, words=3), vocab_size=1000)
    words = {token for ask in asks for token in ask.prompt}
    assert len(words) == 3 and all({int(w) for w in ask.params["logit_bias"]} == words for ask in asks)
    assert len({ask.params["seed"] for ask in asks}) == 5
