"""Skewed traffic on a real instance with --enable-eplb: experts move under running streams, and every token stays the
same; also when a worker dies that shares a hot expert."""

import signal

import pytest

from everserve_bench.balance import Settings, hot_share, make_asks
from tests.support import cluster as c

FLAGS = ("--attention-workers", "2", "--expert-workers", "4", "--no-enable-prefix-caching", *c.PATIENT)
ASKS = make_asks(Settings(num_streams=6, num_prompt=24, max_tokens=120, words=2), vocab_size=4096)


@pytest.fixture(scope="module")
def expected(server):
    return c.right_answers(server, ASKS)


def decisions(server) -> list[dict]:
    return [event for event in server.events("orchestrator") if event["event"] == "balance_decided"]


def experts(server) -> dict:
    return c.get(server, "/cluster/experts").json()


def send_until(server, expected, condition) -> None:
    """The same streams again and again, each of them exact."""
    for _ in range(60):
        assert c.run_all(server, ASKS) == expected
        if condition():
            return
    raise AssertionError(f"it did not happen: {decisions(server)}")


def test_experts_move_for_their_load_and_streams_do_not_notice(start_server, expected):
    with start_server(*FLAGS, "--enable-eplb") as running:
        assert c.run_all(running, ASKS) == expected
        c.wait_until(lambda: experts(running)["imbalance"]["max_over_mean"], what="a report of loads")
        first = experts(running)
        assert hot_share([[e["load"] for e in layer["experts"]] for layer in first["layers"]]) > 0.5, "it is skewed"
        send_until(running, expected, lambda: any(d["is_accepted"] for d in decisions(running)))
        accepted = next(d for d in decisions(running) if d["is_accepted"])
        assert accepted["goal"] > 1 and accepted["expected"] < accepted["max_over_mean"] - 0.1
        send_until(running, expected, lambda: decisions(running)[-1]["is_accepted"] is False)
        check_experts(running)
        assert experts(running)["imbalance"]["max_over_mean"] < first["imbalance"]["max_over_mean"]
        assert c.metric(running, "everserve_expert_load_max_over_mean") >= 1.0
        kill_one_that_shares(running, expected)
        assert "Traceback" not in running.log_text(), running.log_text()


def check_experts(server) -> None:
    """Every expert has two places, and rows go to active ones only where there are workers that deal them."""
    view = experts(server)
    assert [len(layer["experts"]) for layer in view["layers"]] == [64] * 6
    for layer in view["layers"]:
        for expert in layer["experts"]:
            ranks = [place["rank"] for place in expert["places"]]
            assert len(ranks) == len(set(ranks)) >= 2 and expert["places"][0]["active"]
    assert view["imbalance"]["worst_layer"] in [layer["layer"] for layer in view["layers"]]


def kill_one_that_shares(server, expected) -> None:
    """Where rows of an expert are dealt, the death of one place leaves the other."""
    places = [e["places"] for layer in experts(server)["layers"] for e in layer["experts"]]
    shared = [[p["rank"] for p in one if p["active"]] for one in places]
    several = [ranks for ranks in shared if len(ranks) > 1]
    assert several, "with so much skew an expert has several active places"
    fault = c.Fault(server, several[0][0], signal.SIGKILL)
    streams = c.run_with(server, ASKS, c.in_decode, fault)
    c.assert_equal(streams, expected)
    fault.assert_landed()
    c.wait_whole(server)
    assert c.run_all(server, ASKS) == expected


@pytest.mark.long
def test_without_the_flag_loads_are_shown_and_nothing_moves(start_server, expected):
    with start_server(*FLAGS) as running:
        send_until(running, expected, lambda: experts(running)["imbalance"]["max_over_mean"])
        view = experts(running)
        assert all(sum(p["active"] for p in e["places"]) == 1 for layer in view["layers"] for e in layer["experts"])
        assert sum(e["load"] for layer in view["layers"] for e in layer["experts"]) > 0
        assert decisions(running) == []
