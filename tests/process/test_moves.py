"""Planned moves: a worker is asked to leave, its streams go on elsewhere, a new process takes its seat."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support import cluster as c
from tests.support.cluster import DECODE
from tests.support.shared_servers import CLUSTER

LONG = c.asks(6, num_prompt=150, max_tokens=200)


@pytest.fixture(scope="module")
def expected(server):
    return {"decode": c.right_answers(server, DECODE), "long": c.right_answers(server, LONG)}


@pytest.fixture(scope="module")
def shared(shared_servers):
    with shared_servers.lend(*CLUSTER) as running:
        yield running
        assert running.process.poll() is None, running.log_text()


def told(server, name: str) -> list[dict]:
    return [event for event in server.events() if event["event"] == name]


@pytest.mark.parametrize("rank", [0, 3])
def test_sigterm_moves_streams_and_is_no_fault(whole, expected, rank):
    faults, failovers = len(told(whole, "fault_detected")), c.metric(whole, "everserve_failovers_total")
    recomputed, moved = c.metric(whole, "everserve_tokens_recomputed_total"), len(told(whole, "stream_moved"))
    has_streams = "attention" in c.worker(whole, rank)["roles"]
    c.until_it_hits(
        lambda: ask_to_leave(whole, expected, rank) or not has_streams or len(told(whole, "stream_moved")) > moved
    )
    assert len(told(whole, "fault_detected")) == faults and c.metric(whole, "everserve_failovers_total") == failovers
    assert c.metric(whole, "everserve_tokens_recomputed_total") - recomputed <= 2 * len(LONG)


def ask_to_leave(whole, expected, rank: int) -> None:
    before = c.worker(whole, rank)
    streams = c.run_with(whole, LONG, c.in_decode, lambda: os.kill(before["pid"], signal.SIGTERM))
    c.assert_equal(streams, expected["long"])
    c.wait_until(lambda: c.worker(whole, rank)["incarnation"] == before["incarnation"] + 1, what="a successor")
    c.wait_until(lambda: any(e["rank"] == rank for e in told(whole, "worker_left")), what="the leave")
    exits = [e for e in told(whole, "worker_exited") if (e["rank"], e["incarnation"]) == (rank, before["incarnation"])]
    assert [event["exit_status"] for event in exits] == [0]
    c.wait_whole(whole)


def test_drain_over_http(whole):
    incarnation = c.worker(whole, 0)["incarnation"]
    answer = c.post(whole, "/cluster/drain", {"rank": 0})
    assert (answer.status_code, answer.json()) == (202, {"rank": 0, "incarnation": incarnation})
    c.wait_until(lambda: c.worker(whole, 0)["incarnation"] > incarnation, what="a successor")
    assert c.post(whole, "/cluster/drain", {"rank": 9}).status_code == 404


def test_a_rolling_restart_of_every_worker_under_load(whole, expected):
    before = {w["rank"]: w["incarnation"] for w in c.cluster(whole)["workers"]}
    command = [sys.executable, "-m", "everserve.cli", "drain", "--all", "--url", whole.url]
    roll = lambda: subprocess.run(command, check=True, capture_output=True, timeout=120)  # noqa: E731
    load = LONG * 2
    streams = c.run_with(whole, load, c.in_decode, roll)
    c.assert_equal(streams, expected["long"] * 2)
    after = {w["rank"]: w["incarnation"] for w in c.cluster(whole)["workers"]}
    assert after == {rank: incarnation + 1 for rank, incarnation in before.items()}
    assert c.run_all(whole, DECODE) == expected["decode"]


def test_workers_asked_to_leave_together_while_the_orchestrator_dies(whole, expected):
    """Those that stand in for each other leave one after the other, or stay: no stream waits for an expert."""
    helpers = {process["name"]: process["pid"] for process in c.cluster(whole)["processes"]}
    pauses = len(told(whole, "streams_paused"))

    def drain_all_and_kill() -> None:
        answers = [c.post(whole, "/cluster/drain", {"rank": rank}) for rank in (2, 3)]
        os.kill(helpers["orchestrator"], signal.SIGKILL)
        assert answers[0].status_code == 202, answers

    streams = c.run_with(whole, LONG, c.in_decode, drain_all_and_kill)
    c.assert_equal(streams, expected["long"])
    c.wait_until(lambda: told(whole, "orchestrator_recovered"), what="the next orchestrator")
    c.wait_whole(whole)
    assert len(told(whole, "streams_paused")) == pauses


def test_it_is_killed_while_it_leaves(whole, expected):
    """TERM, then KILL: whatever it had not given back yet is lost and found as ever."""
    victim = c.worker(whole, 0)["pid"]

    def both() -> None:
        os.kill(victim, signal.SIGTERM)
        os.kill(victim, signal.SIGKILL)

    streams = c.run_with(whole, DECODE, c.in_decode, both)
    c.assert_equal(streams, expected["decode"])
    c.wait_whole(whole)


@pytest.mark.long
def test_the_only_worker_leaves(start_server, server):
    """Its streams wait for its successor, and go on from its log."""
    right = c.right_answers(server, DECODE)
    with start_server() as running:
        before = c.worker(running, 0)
        streams = c.run_with(running, DECODE, c.in_decode, lambda: os.kill(before["pid"], signal.SIGTERM))
        c.assert_equal(streams, right)
        assert c.worker(running, 0)["incarnation"] == before["incarnation"] + 1
