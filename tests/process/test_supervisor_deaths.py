"""The supervisor may die at any time: the next one goes on, and neither streams nor workers nor the gateway notice."""

import os
import random
import signal
from pathlib import Path

import pytest

from everserve.procs.process import children_of
from tests.support import cluster as c
from tests.support.cluster import DECODE, Fault
from tests.support.shared_servers import CLUSTER

LONG = c.asks(6, num_prompt=20, max_tokens=240)
HELPERS = ("orchestrator", "anchor", "zygote")


@pytest.fixture(scope="module")
def shared(shared_servers):
    with shared_servers.lend(*CLUSTER) as running:
        yield running
        assert running.process.poll() is None, running.log_text()


@pytest.fixture(scope="module")
def expected(server):
    return {"decode": c.right_answers(server, DECODE), "long": c.right_answers(server, LONG)}


@pytest.fixture
def settled(whole):
    """As a server that has had no supervisor but one: what was there before must be there after."""
    before, held = pids(whole), holdings(whole)
    yield whole
    c.wait_whole(whole)
    after = pids(whole)
    assert {after[name] for name in ("root", "gateway")} == {before[name] for name in ("root", "gateway")}
    c.wait_until(lambda: strays(whole) == set(), what="the end of all processes that no table names")
    c.wait_until(lambda: holdings(whole) <= held, what=f"no more descriptors than {held}")


def pids(server) -> dict[str, int]:
    return {one["name"]: one["pid"] for one in c.cluster(server)["processes"]}


def strays(server) -> set[int]:
    """Children of root that /cluster does not know."""
    known = {*pids(server).values(), *(one["pid"] for one in c.cluster(server)["workers"])}
    return set(children_of(server.process.pid)) - known


def holdings(server) -> int:
    """Descriptors of root, which are the supervisor's."""
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def workers(server) -> list[tuple[int, int, int]]:
    return [(one["rank"], one["incarnation"], one["pid"]) for one in c.cluster(server)["workers"]]


def replace(server, signum: signal.Signals = signal.SIGKILL) -> int:
    """Kill it, and wait for the next one, which has told the gateway so."""
    old = pids(server)["supervisor"]
    os.kill(old, signum)
    c.wait_until(lambda: pids(server).get("supervisor") not in (None, old), what="another supervisor")
    return old


def wait_helpers(server, old: dict[str, int]) -> None:
    for name in HELPERS:
        c.wait_until(lambda name=name: pids(server).get(name) not in (None, old[name]), what=f"a new {name}")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_streams_and_workers_do_not_notice(settled, expected, signum):
    before, old = workers(settled), pids(settled)
    streams = c.run_with(settled, LONG, c.in_decode, lambda: replace(settled, signum))
    c.assert_equal(streams, expected["long"])
    wait_helpers(settled, old)
    c.wait_whole(settled)
    assert workers(settled) == before


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_first", [True, False], ids=["before the worker", "after the worker"])
def test_a_worker_dies_at_the_same_moment(settled, expected, rank, is_first):
    """Its end is heard by the next supervisor, or its successor is started by it."""
    fault, supervisor = Fault(settled, rank, signal.SIGKILL), pids(settled)["supervisor"]

    def both() -> None:
        for strike in (lambda: os.kill(supervisor, signal.SIGKILL), fault)[:: 1 if is_first else -1]:
            strike()

    streams = c.run_with(settled, DECODE, c.in_decode, both)
    c.assert_equal(streams, expected["decode"])
    c.wait_until(lambda: c.worker(settled, rank)["incarnation"] > fault.incarnation, what="a successor")


def test_everything_but_root_and_the_gateway_at_once(settled, expected):
    """With one of the workers."""
    old, victim = pids(settled), c.worker(settled, 1)

    def act() -> None:
        for pid in (old["supervisor"], *(old[name] for name in HELPERS), victim["pid"]):
            os.kill(pid, signal.SIGKILL)

    streams = c.run_with(settled, DECODE, c.in_decode, act)
    c.assert_equal(streams, expected["decode"])
    wait_helpers(settled, old)
    c.wait_until(lambda: c.worker(settled, 1)["incarnation"] > victim["incarnation"], what="a successor")


def test_again_while_it_takes_over_and_at_once_after_its_start(settled, expected):
    """As soon as there is a process, before it has said anything; and once it has."""

    def act() -> None:
        for _ in range(2):
            old = pids(settled)["supervisor"]
            os.kill(old, signal.SIGKILL)
            c.wait_until(lambda old=old: newest(settled) not in (None, old), what="a process")
            os.kill(newest(settled), signal.SIGKILL)
            c.wait_until(lambda old=old: pids(settled).get("supervisor") != old, what="another supervisor")
        replace(settled)

    c.assert_equal(c.run_with(settled, LONG, c.in_decode, act), expected["long"])


def newest(server) -> int | None:
    """The process that is a supervisor, or becomes one."""
    root = server.process.pid
    command = Path(f"/proc/{root}/cmdline").read_text()
    found = []
    for pid in children_of(root):
        try:
            if Path(f"/proc/{pid}/cmdline").read_text() == command and c.is_alive(pid):
                found.append(pid)
        except OSError:
            continue
    return max(found, default=None)


@pytest.mark.parametrize("seen", ["worker_exited", "worker_provisioned", "worker_started"])
def test_while_it_starts_a_worker(settled, expected, seen):
    """Killed as soon as this was told: it has recorded it, or not yet."""
    before = c.worker(settled, 2)
    incarnation = before["incarnation"] + (seen != "worker_exited")

    def has_been_told() -> bool:
        return any(
            (one["event"], one.get("rank")) == (seen, 2) and one["incarnation"] >= incarnation
            for one in settled.events()
        )

    os.kill(before["pid"], signal.SIGKILL)
    c.wait_until(has_been_told, what=seen)
    replace(settled)
    c.wait_until(lambda: c.worker(settled, 2)["incarnation"] > before["incarnation"], what="a successor")
    c.wait_whole(settled)
    assert c.run_all(settled, DECODE) == expected["decode"]


def test_an_operator_can_do_it_over_http(settled):
    old = pids(settled)["supervisor"]
    answer = c.post(settled, "/cluster/fault", {"process": "supervisor", "signal": "KILL"})
    assert answer.status_code == 200 and answer.json()["pid"] == old
    c.wait_until(lambda: pids(settled).get("supervisor") not in (None, old), what="another supervisor")
    assert c.post(settled, "/cluster/fault", {"process": "root", "signal": "KILL"}).status_code == 404


@pytest.mark.parametrize("num_kills", [6, pytest.param(100, marks=pytest.mark.long)])
def test_again_and_again_under_streams(settled, expected, num_kills):
    """Now and then together with another process, at random; streams begin and end meanwhile."""
    dice = random.Random(num_kills)

    def act() -> None:
        for number in range(num_kills):
            old = pids(settled)
            others = [old.get(name) for name in dice.sample(HELPERS, dice.randrange(3))]
            others += [c.worker(settled, dice.randrange(4))["pid"]] if number % 3 == 2 else []
            os.kill(old["supervisor"], signal.SIGKILL)
            for pid in filter(None, others):
                if pid in children_of(settled.process.pid):
                    os.kill(pid, signal.SIGKILL)
            c.wait_until(lambda old=old: pids(settled).get("supervisor") not in (None, old["supervisor"]))
            wait_helpers(settled, old | dict.fromkeys(set(HELPERS) - set(old), 0))
            if number % 3 == 2:
                c.wait_whole(settled)

    c.under_load(settled, DECODE, expected["decode"], act)
