"""Expert workers that share a GPU and have no shadows die under streams: others compute with the experts where the dead
ones left them, on the device, and nothing is copied (`--map-experts on`, the default).

One server for all tests: it must be whole again after each.
"""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from everserve.procs.local_server import LocalServer
from tests.gpu.needs import SERVER
from tests.gpu.test_cluster import ASKS, cluster, run, tokens
from tests.support import cluster as c

pytestmark = [*SERVER, pytest.mark.timeout(180)]
FLAGS = ("--devices", "3", "--shadow-experts", "0", "--map-experts", "on", "--kv-cache-memory-bytes", str(1 << 30))
EXPERTS = (2, 3, 4)


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalServer]:
    with cluster(2, len(EXPERTS), *FLAGS) as server:
        yield server
        assert "Traceback" not in server.log_text(), server.log_text()


@pytest.fixture(scope="module")
def expected(shared: LocalServer) -> list[list[int]]:
    """Undisturbed. That tokens do not depend on who computes them is shown elsewhere (test_cluster.py)."""
    return tokens(run(shared))


def moved(server: LocalServer) -> list[tuple[str, int]]:
    """Source and bytes of all fills so far."""
    events = [event for event in server.events() if event["event"] == "experts_moved"]
    return [(event["source"], event["num_bytes"]) for event in events]


def wait_own(server: LocalServer) -> None:
    """Full strength, and every expert in memory of the worker that serves it."""
    c.wait_until(lambda: c.is_whole(server), 60, "full strength")
    num_own = max(worker["slots"] for worker in c.cluster(server)["workers"])

    def is_own() -> bool:
        layers = httpx.get(f"{server.url}/cluster/experts").json()["layers"]
        places = [expert["places"] for layer in layers for expert in layer["experts"]]
        return all(len(one) == 1 and one[0]["slot"] < num_own for one in places)

    c.wait_until(is_own, 60, "no expert in borrowed memory")


def kill(server: LocalServer, *ranks: int) -> None:
    for rank in ranks:
        os.kill(c.worker(server, rank)["pid"], signal.SIGKILL)


@pytest.mark.parametrize("rank", EXPERTS)
def test_experts_of_a_dead_worker_are_served_where_they_are(
    shared: LocalServer, expected: list[list[int]], rank: int
) -> None:
    """Each in turn: every worker has mapped, and was mapped."""
    before, fault = len(moved(shared)), c.Fault(shared, rank, signal.SIGKILL)
    assert tokens(c.run_with(shared, ASKS, c.in_decode, fault)) == expected
    fault.assert_landed()
    wait_own(shared)
    assert set(moved(shared)[before:]) == {("mapped", 0)}, moved(shared)[before:]


def test_two_die_with_the_orchestrator(shared: LocalServer, expected: list[list[int]]) -> None:
    """One is left, with room for some of their experts: the rest waits for the next workers."""

    def kill_all() -> None:
        kill(shared, 2, 4)
        process = next(one for one in c.cluster(shared)["processes"] if one["name"] == "orchestrator")
        os.kill(process["pid"], signal.SIGKILL)

    assert tokens(c.run_with(shared, ASKS, c.in_decode, kill_all)) == expected
    wait_own(shared)


def test_a_device_is_lost_while_others_map_its_memory(shared: LocalServer, expected: list[list[int]]) -> None:
    """The devices are shares of one GPU. What is withdrawn is not read any more, and comes from the files."""
    victim, before = c.worker(shared, 3), len(moved(shared))

    def kill_then_lose() -> None:
        kill(shared, 3)
        c.wait_until(lambda: ("mapped", 0) in moved(shared)[before:], 30, "mapped experts")
        answer = c.post(shared, "/cluster/fault", {"device": victim["device"], "gone": False})
        assert answer.status_code == 200, answer.text

    assert tokens(c.run_with(shared, ASKS, c.in_decode, kill_then_lose)) == expected
    wait_own(shared)
    assert shared.log_text().count("could not load") <= 2 * len(EXPERTS), "a line for each report, if any"
