"""Whoever decides, and whoever owns memory, may die under running streams: the streams do not need them."""

import os
import signal

import httpx
import pytest

from tests.support import cluster as c
from tests.support.cluster import DECODE, Fault
from tests.support.shared_servers import CLUSTER

LONG = c.asks(6, num_prompt=20, max_tokens=240)


@pytest.fixture(scope="module")
def expected(server):
    return {"decode": c.right_answers(server, DECODE), "long": c.right_answers(server, LONG)}


@pytest.fixture(scope="module")
def shared(shared_servers):
    with shared_servers.lend(*CLUSTER) as running:
        yield running
        assert running.process.poll() is None, running.log_text()


def pid_of(server, name: str) -> int:
    return next((p["pid"] for p in c.cluster(server)["processes"] if p["name"] == name), 0)


def recoveries(server) -> list[dict]:
    return [event for event in server.events("orchestrator") if event["event"] == "orchestrator_recovered"]


def kill(*pids: int, signum: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        os.kill(pid, signum)


@pytest.mark.parametrize("names", [("orchestrator",), ("orchestrator", "anchor")], ids="+".join)
def test_streams_do_not_notice(whole, expected, names):
    """Nobody is lost with them, and the tables are as they were, with a higher epoch."""
    before, old = c.cluster(whole), {name: pid_of(whole, name) for name in names}
    num_recovered = len(recoveries(whole))
    streams = c.run_with(whole, LONG, c.in_decode, lambda: kill(*old.values()))
    c.assert_equal(streams, expected["long"])
    for name, pid in old.items():
        c.wait_until(lambda name=name, pid=pid: pid_of(whole, name) not in (0, pid), what=f"a new {name}")
    c.wait_whole(whole)
    after = c.cluster(whole)
    identity = [(w["rank"], w["incarnation"], w["pid"]) for w in before["workers"]]
    assert [(w["rank"], w["incarnation"], w["pid"]) for w in after["workers"]] == identity
    if "orchestrator" in names:
        c.wait_until(lambda: len(recoveries(whole)) > num_recovered, what="a recovery")
        assert recoveries(whole)[-1]["num_missing"] == 0 and after["epoch"] > before["epoch"]


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.long)])
def test_the_new_one_can_do_everything(whole, expected, rank):
    """After all of them were replaced, a worker's death is survived and healed as ever."""
    for name in ("orchestrator", "anchor", "zygote"):
        old = pid_of(whole, name)
        kill(old)
        c.wait_until(lambda name=name, old=old: pid_of(whole, name) not in (0, old), what=f"a new {name}")
    c.wait_whole(whole)
    fault = Fault(whole, rank, signal.SIGKILL)
    streams = c.run_with(whole, DECODE, c.in_decode, fault)
    fault.assert_landed()
    c.assert_equal(streams, expected["decode"])
    c.wait_whole(whole)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_worker_dies_while_nobody_decides(whole, expected, rank):
    """Streams of an attention worker go on from its log; an expert's shadows take over; the new orchestrator heals."""
    orchestrator, victim = pid_of(whole, "orchestrator"), c.worker(whole, rank)
    streams = c.run_with(whole, LONG, c.in_decode, lambda: kill(orchestrator, victim["pid"]))
    c.assert_equal(streams, expected["long"])
    c.wait_until(lambda: c.worker(whole, rank)["incarnation"] > victim["incarnation"], what="a successor")
    c.wait_whole(whole)
    assert c.run_all(whole, DECODE) == expected["decode"]


def test_everything_but_the_gateway_at_once(whole, expected):
    """Both attention workers, an expert, the orchestrator and the anchor: streams pause, and none loses a token."""
    helpers = [pid_of(whole, name) for name in ("orchestrator", "anchor", "zygote")]
    workers = [c.worker(whole, rank) for rank in (0, 1, 2)]
    streams = c.run_with(whole, DECODE, c.in_decode, lambda: kill(*helpers, *(w["pid"] for w in workers)))
    c.assert_equal(streams, expected["decode"])
    c.wait_until(
        lambda: all(c.worker(whole, w["rank"])["incarnation"] > w["incarnation"] for w in workers), what="successors"
    )
    c.wait_whole(whole)


def test_probes_while_it_heals(whole, expected):
    """No expert has a place, and what workers are forked from is gone: send requests elsewhere, restart nothing."""
    answers: dict[str, list[int]] = {"/health": [], "/readyz": [], "/livez": []}

    def probe() -> bool:
        for path, seen in answers.items():
            seen.append(httpx.get(f"{whole.url}{path}", timeout=60).status_code)
        return 503 in answers["/health"] and 503 in answers["/readyz"]

    def act() -> None:
        assert not probe() and {path: seen[0] for path, seen in answers.items()} == dict.fromkeys(answers, 200)
        kill(pid_of(whole, "zygote"), *(c.worker(whole, rank)["pid"] for rank in (2, 3)))
        c.wait_until(probe, what="an instance that heals itself")

    streams = c.run_with(whole, DECODE, c.in_decode, act)
    c.assert_equal(streams, expected["decode"])
    c.wait_whole(whole)
    probe()
    assert answers["/health"][-1] == answers["/readyz"][-1] == 200 and set(answers["/livez"]) == {200}


def test_a_stopped_orchestrator_is_replaced(whole, expected):
    old = pid_of(whole, "orchestrator")
    streams = c.run_with(whole, LONG, c.in_decode, lambda: kill(old, signum=signal.SIGSTOP))
    c.assert_equal(streams, expected["long"])
    c.wait_until(lambda: pid_of(whole, "orchestrator") not in (0, old), what="a new one")
    c.wait_whole(whole)


def test_a_worker_that_stops_while_nobody_decides(whole, expected):
    """The new orchestrator finds a process that does not report, and sees that it hangs."""
    old, fault = pid_of(whole, "orchestrator"), Fault(whole, 1, signal.SIGSTOP)

    def both() -> None:
        kill(old)
        fault()

    streams = c.run_with(whole, DECODE, c.in_decode, both)
    fault.assert_landed()
    c.assert_equal(streams, expected["decode"])
    fault.wake()
    c.wait_until(lambda: not c.is_alive(fault.pid), what="its end")
    c.wait_whole(whole)


def test_an_operator_can_do_it_over_http(whole):
    old = pid_of(whole, "orchestrator")
    answer = c.post(whole, "/cluster/fault", {"process": "orchestrator", "signal": "KILL"})
    assert answer.status_code == 200 and answer.json()["pid"] == old
    c.wait_until(lambda: pid_of(whole, "orchestrator") not in (0, old), what="a new one")
    c.wait_whole(whole)
    assert c.post(whole, "/cluster/fault", {"process": "nobody", "signal": "KILL"}).status_code == 404


@pytest.mark.long
@pytest.mark.parametrize("num_kills", [4])
def test_an_orchestrator_that_dies_again_and_again(whole, expected, num_kills):
    """Also in the middle of its recovery."""

    def again_and_again() -> None:
        for _ in range(num_kills):
            c.wait_until(lambda: pid_of(whole, "orchestrator"), what="an orchestrator")
            old = pid_of(whole, "orchestrator")
            kill(old)
            c.wait_until(lambda old=old: pid_of(whole, "orchestrator") not in (0, old), what="the next")

    streams = c.run_with(whole, LONG, c.in_decode, again_and_again)
    c.assert_equal(streams, expected["long"])
    c.wait_whole(whole)
