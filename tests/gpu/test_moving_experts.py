"""A server whose devices are shares of one GPU: experts of lost devices come from the backup, beside streams."""

import signal

import pytest

from everserve.procs.local_server import LocalServer
from tests.gpu.needs import SERVER
from tests.gpu.test_cluster import ASKS, cluster, run, tokens
from tests.support import cluster as c

pytestmark = [*SERVER, pytest.mark.timeout(300)]
NUM_DEVICES = 4
FLAGS = (
    "-dp", str(NUM_DEVICES), "--enable-expert-parallel", "--expert-backup", "host", "--kv-log", "mirror",
    "--kv-cache-memory-bytes", str(1 << 30),
)  # fmt: skip


def sources(server: LocalServer) -> set[str]:
    return {event["source"] for event in server.events() if event["event"] == "experts_moved"}


def num_found(server: LocalServer) -> list[int]:
    """How many slots each expert worker found full when it started."""
    lines = [line for line in server.log_text().splitlines() if "expert slots were in memory already" in line]
    return [int(line.split(" INFO ")[1].split()[0]) for line in lines]


def test_deaths_and_losses_of_devices() -> None:
    with cluster(1, 0) as server:
        expected = tokens(run(server))
    with LocalServer("demo", "--device", "cuda", "--enable-chaos", *FLAGS) as server:
        assert tokens(run(server)) == expected
        is_backed_up = lambda: c.num_backed_up(server) == NUM_DEVICES  # noqa: E731
        try:
            c.wait_until(is_backed_up, 60, "a complete backup")
        except AssertionError as error:
            raise AssertionError(server.log_text()) from error
        rank = next(worker["rank"] for worker in c.cluster(server)["workers"] if "expert" in worker["roles"])
        fault = c.Fault(server, rank, signal.SIGKILL)
        assert tokens(c.run_with(server, ASKS, c.in_decode, fault)) == expected
        fault.assert_landed()
        c.wait_until(lambda: c.is_whole(server), 60, "full strength")
        first, found = num_found(server)[:NUM_DEVICES], num_found(server)[NUM_DEVICES:]
        assert first == [0] * NUM_DEVICES and len(found) == 1 and found[0] > 0, "its successor loads nothing"

        def lose() -> None:
            for device in (0, NUM_DEVICES - 1):
                assert c.post(server, "/cluster/fault", {"device": device, "gone": True}).status_code == 200

        assert tokens(c.run_with(server, ASKS, c.in_decode, lose)) == expected
        assert "host" in sources(server) and "file" not in sources(server), sources(server)
        assert "Traceback" not in server.log_text(), server.log_text()
