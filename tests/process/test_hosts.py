"""Replicas over three hosts: a host may die, lose its power or its link, and no stream of it loses a token."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support import cluster as c
from tests.support import hosts
from tests.support.hosts import Network

GRACE_S = 5.0  # a busy machine may keep a carrier waiting for longer than the default
FLAGS = ("--attention-workers", "3", "--host-grace-s", str(GRACE_S), "--enable-chaos", *c.PATIENT)

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "hosts can be made")


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Iterator[Network]:
    """Three hosts with a worker each."""
    made = Network(3, tmp_path_factory.mktemp("hosts"))
    try:
        made.serve(*FLAGS)
        c.wait_until(made.key.exists, what="the key")
        made.join(1)
        c.wait_until(lambda: _num_joined(made) == 2, what="the second host")  # or it would be the third
        made.join(2)
        c.wait_until(lambda: _serves(made), what="the start")
        yield made
        assert "Traceback" not in made.log_text(), made.log_text()
    finally:
        made.close()
        print(made.log_text())  # pytest shows it where a test has failed


def _num_joined(network: Network) -> int:
    with contextlib.suppress(httpx.HTTPError, ValueError):
        return states(network).count("serving")
    return 0


def _serves(network: Network) -> bool:
    with contextlib.suppress(httpx.HTTPError, ValueError):
        return c.is_whole(network) and len(c.cluster(network)["workers"]) == 3
    return False


@pytest.fixture
def whole(network) -> Network:
    """Every host is there, with its worker."""
    c.wait_until(lambda: _serves(network) and states(network) == ["serving"] * 3, what="full strength")
    return network


@pytest.fixture(scope="module")
def expected(server) -> list[list[int]]:
    """What one host answers."""
    return c.right_answers(server, c.DECODE)


def states(network: Network) -> list[str]:
    return [host["state"] for host in c.cluster(network)["hosts"]]


def incarnations(network: Network) -> dict[int, int]:
    return {worker["rank"]: worker["incarnation"] for worker in c.cluster(network)["workers"]}


def ask(network: Network, path: str, body: object) -> httpx.Response:
    """As an operator."""
    return httpx.post(f"{network.url}{path}", json=body, headers=dict(network.admin), timeout=None)


def losses(network: Network) -> list[dict[str, Any]]:
    return [event for event in network.events("orchestrator") if event["event"] == "host_lost"]


def through(network: Network, expected: list[list[int]], act: Callable[[], object]) -> None:
    """Streams run on all hosts while this happens, and are as they would be without it."""
    c.assert_equal(c.run_with(network, c.DECODE, c.in_decode, act), expected)


def test_workers_are_spread_and_streams_are_those_of_one_host(whole, expected):
    found = c.cluster(whole)
    assert [(worker["rank"], worker["host"]) for worker in found["workers"]] == [(0, 0), (1, 1), (2, 2)]
    assert [host["workers"] for host in found["hosts"]] == [[0], [1], [2]]
    assert {process["name"] for process in found["processes"] if process["host"] == 1} >= {"agent", "anchor", "carrier"}
    assert c.run_all(whole, c.DECODE) == expected
    assert c.metric(whole, "everserve_hosts") == 3


def test_a_killed_worker_is_replaced_on_its_host(whole, expected):
    before = incarnations(whole)
    through(whole, expected, lambda: os.kill(whole.hosts[1].pids("es-worker-1")[0], signal.SIGKILL))
    c.wait_until(lambda: incarnations(whole)[1] > before[1], what="a successor")
    assert c.worker(whole, 1)["host"] == 1
    assert len(losses(whole)) == 0


@pytest.mark.parametrize("part", ["anchor", "zygote"])
def test_a_killed_part_of_an_agent_is_replaced(whole, expected, part):
    before, (pid,) = incarnations(whole), whole.hosts[2].pids(f"es-{part}")
    through(whole, expected, lambda: os.kill(pid, signal.SIGKILL))
    c.wait_until(lambda: pid not in (found := whole.hosts[2].pids(f"es-{part}")) and found, what="another one")
    assert incarnations(whole) == before
    os.kill(whole.hosts[2].pids("es-worker-2")[0], signal.SIGKILL)  # the new part does what the old one did
    c.wait_until(lambda: incarnations(whole)[2] > before[2] and c.is_whole(whole), what="a successor")


def test_a_link_that_is_cut_for_a_moment(whole, expected):
    """Streams wait, and go on where they are."""
    before, lost = incarnations(whole), len(losses(whole))

    def blink() -> None:
        whole.hosts[1].cut()
        time.sleep(GRACE_S / 5)  # so long is the cut
        whole.hosts[1].heal()

    through(whole, expected, blink)
    assert (incarnations(whole), len(losses(whole))) == (before, lost)


def test_a_killed_orchestrator_and_gateway(whole, expected):
    """The next ones get channels to the workers of all hosts."""
    before = incarnations(whole)
    for name in ("orchestrator", "gateway"):
        (pid,) = whole.hosts[0].pids(f"es-{name}")
        through(whole, expected, lambda pid=pid: os.kill(pid, signal.SIGKILL))
        c.wait_until(lambda: _serves(whole), what="full strength")
    assert incarnations(whole) == before
    served = set[int]()

    def all_serve(streams: object) -> bool:
        served.update(one["rank"] for one in c.cluster(whole)["workers"] if one["requests"])
        return served == {0, 1, 2}

    c.until_it_hits(lambda: c.run_with(whole, c.DECODE, all_serve, lambda: None) and served == {0, 1, 2})


def test_the_death_of_a_host(whole, expected):
    """SIGKILL of its first process."""
    before = incarnations(whole)
    through(whole, expected, whole.hosts[1].kill)
    c.wait_until(lambda: states(whole)[1] == "lost", what="the loss")
    assert losses(whole)[-1]["ranks"] == [1]
    assert c.run_all(whole, c.DECODE) == expected
    whole.join(1)
    c.wait_until(lambda: _serves(whole), what="full strength")
    assert (incarnations(whole)[1], c.worker(whole, 1)["host"]) == (before[1] + 1, 1)


@pytest.mark.parametrize(("number", "process"), [(1, "es-agent"), (1, "es-carrier"), (0, "es-carrier")])
def test_the_death_of_an_agent_or_a_carrier(whole, expected, number, process):
    """The host is lost, and joins again; of the first host's carrier, all are."""
    before, (pid,) = incarnations(whole), whole.hosts[number].pids(process)
    through(whole, expected, lambda: os.kill(pid, signal.SIGKILL))
    ranks = (1,) if number else (1, 2)
    c.wait_until(lambda: all(incarnations(whole)[rank] > before[rank] for rank in ranks), what="successors")
    c.wait_until(lambda: _serves(whole), what="full strength")
    assert incarnations(whole)[0] == before[0]
    assert [worker["host"] for worker in c.cluster(whole)["workers"]] == [0, 1, 2]


def test_a_power_loss(whole, expected):
    """Nothing says that the host is dead: its silence does."""
    lost = len(losses(whole))

    def power_off() -> None:
        whole.hosts[2].cut()
        whole.hosts[2].kill()

    through(whole, expected, power_off)
    c.wait_until(lambda: states(whole)[2] == "lost", what="the loss")
    assert len(losses(whole)) == lost + 1
    whole.hosts[2].heal()
    whole.join(2)


def test_a_link_that_is_cut_for_long(whole, expected):
    """The host is lost; when the link is back its agent has ended its workers, and joins with new ones."""
    before = incarnations(whole)
    through(whole, expected, whole.hosts[1].cut)
    c.wait_until(lambda: states(whole)[1] == "lost", what="the loss")
    (old,) = whole.hosts[1].pids("es-worker-1")
    whole.hosts[1].heal()
    c.wait_until(lambda: _serves(whole), what="full strength")
    assert incarnations(whole)[1] == before[1] + 1
    assert not c.is_alive(old)


def test_an_operator_loses_a_host_and_returns_it(whole, expected):
    """While it is gone its worker is on another one."""
    answer = ask(whole, "/cluster/fault", {"host": 1, "gone": True})
    assert (answer.status_code, answer.json()) == (200, {"host": 1, "ranks": [1]})
    c.wait_until(lambda: c.is_whole(whole) and c.worker(whole, 1)["host"] != 1, what="the worker elsewhere")
    assert states(whole)[1] == "gone"
    assert c.run_all(whole, c.DECODE) == expected
    assert ask(whole, "/cluster/return", {"host": 1}).status_code == 200
    c.wait_until(lambda: states(whole)[1] == "serving", what="the return")
    c.wait_until(lambda: [len(host["workers"]) for host in c.cluster(whole)["hosts"]] == [1, 1, 1], what="its share")
    assert ask(whole, "/cluster/fault", {"host": 0}).status_code == 409


@pytest.mark.parametrize("is_in_order", [True, False])
def test_the_end_of_the_first_host(whole, expected, is_in_order):
    """The others end their workers, and join the next instance that has the key."""
    if is_in_order:
        os.kill(whole.hosts[0].first, signal.SIGTERM)
        c.wait_until(lambda: not whole.hosts[0].is_running, what="the end")
    else:
        whole.hosts[0].kill()
    c.wait_until(lambda: not (whole.hosts[1].pids("es-worker-1") + whole.hosts[2].pids("es-worker-2")), what="ends")
    whole.serve(*FLAGS)
    c.wait_until(lambda: _serves(whole), what="full strength")
    assert c.run_all(whole, c.DECODE) == expected
