"""Expert workers that share a GPU and have no shadows die under streams: others compute with the experts where the dead
ones left them, on the device, and nothing is copied."""

import os
import signal

import httpx
import pytest

from everserve.procs.local_server import LocalServer
from tests.gpu.needs import SERVER
from tests.gpu.test_cluster import ASKS, cluster, run, tokens
from tests.process import cluster as c

pytestmark = [*SERVER, pytest.mark.timeout(300)]
FLAGS = ("--shadow-experts", "0", "--kv-cache-memory-bytes", str(1 << 30))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with cluster(1, 0) as server:
        return tokens(run(server))


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


def test_experts_of_dead_workers_are_served_where_they_are(expected: list[list[int]]) -> None:
    """Each in turn, so that every worker has mapped and was mapped; then two at once, which leaves one that has room
    for some of their experts: the rest waits for the next workers."""
    with cluster(2, 3, *FLAGS) as server:
        assert tokens(run(server)) == expected
        for rank in (2, 3, 4, 2):
            before = len(moved(server))
            fault = c.Fault(server, rank, signal.SIGKILL)
            assert tokens(c.run_with(server, ASKS, c.in_decode, fault)) == expected
            fault.assert_landed()
            wait_own(server)
            assert set(moved(server)[before:]) == {("mapped", 0)}, moved(server)

        def kill_two() -> None:
            for rank in (2, 4):
                os.kill(c.worker(server, rank)["pid"], signal.SIGKILL)

        assert tokens(c.run_with(server, ASKS, c.in_decode, kill_two)) == expected
        wait_own(server)
        assert "Traceback" not in server.log_text(), server.log_text()


def test_the_orchestrator_dies_with_the_worker(expected: list[list[int]]) -> None:
    with cluster(1, 2, *FLAGS) as server:

        def kill_both() -> None:
            os.kill(c.worker(server, 2)["pid"], signal.SIGKILL)
            process = next(one for one in c.cluster(server)["processes"] if one["name"] == "orchestrator")
            os.kill(process["pid"], signal.SIGKILL)

        assert tokens(c.run_with(server, ASKS, c.in_decode, kill_both)) == expected
        wait_own(server)
        assert tokens(run(server)) == expected
        assert "Traceback" not in server.log_text(), server.log_text()


def test_a_device_is_lost_while_others_map_its_memory(expected: list[list[int]]) -> None:
    """The devices are shares of one GPU. What is withdrawn is not read any more, and comes from the files."""
    flags = ("--devices", "3", *FLAGS)
    with cluster(3, 3, *flags) as server:
        victim = next(worker for worker in c.cluster(server)["workers"] if "expert" in worker["roles"])

        def kill_then_lose() -> None:
            os.kill(victim["pid"], signal.SIGKILL)
            c.wait_until(lambda: ("mapped", 0) in moved(server), 30, "mapped experts")
            answer = c.post(server, "/cluster/fault", {"device": victim["device"], "gone": False})
            assert answer.status_code == 200, answer.text

        assert tokens(c.run_with(server, ASKS, c.in_decode, kill_then_lose)) == expected
        c.wait_until(lambda: c.is_whole(server), 60, "full strength")
        assert "Traceback" not in server.log_text(), server.log_text()
