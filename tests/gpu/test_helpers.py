"""Zygote and anchor are killed while workers on the same device are in the middle of their streams. Both have kernels
on that device: the zygote's spares rehearse, the anchor clears memory that it hands out."""

import os
import signal

import pytest

from everserve.procs.local_server import LocalServer
from tests.gpu.needs import SERVER
from tests.gpu.test_cluster import ASKS, run, tokens, workers
from tests.gpu.test_spares import end, rehearsing
from tests.support import cluster as c

pytestmark = [*SERVER, pytest.mark.timeout(300)]
FLAGS = ("--device", "cuda", "--attention-workers", "2", "--expert-workers", "2", "--spares", "1", "--enable-chaos")


def pid_of(server: LocalServer, name: str) -> int:
    return next(process["pid"] for process in c.cluster(server)["processes"] if process["name"] == name)


def seats(server: LocalServer) -> list[tuple[int, int]]:
    return [(worker["pid"], worker["incarnation"]) for worker in workers(server).values()]


def test_nobody_on_the_device_is_harmed() -> None:
    with LocalServer("demo", *FLAGS, "--kv-cache-memory-bytes", str(1 << 30)) as server:
        expected = tokens(run(server))
        before = seats(server)
        for _ in range(3):  # in the middle of a rehearsal
            c.wait_until(lambda: c.cluster(server)["spares"]["ready"] == 1, 60, "a spare")
            end(next(p["pid"] for p in c.cluster(server)["processes"] if p["name"] == "spare-0"))
            c.wait_until(lambda: rehearsing(server), 60, "a rehearsal")
            assert tokens(c.run_with(server, ASKS, c.in_decode, lambda: end(pid_of(server, "zygote")))) == expected
            assert seats(server) == before
        for _ in range(3):  # in the middle of allocations: a successor gets a new pool, and peers new lanes
            c.wait_until(lambda: c.is_whole(server), 60, "full strength")
            victim = c.worker(server, 0)["pid"]

            def kill_both(victim: int = victim) -> None:
                os.kill(victim, signal.SIGKILL)
                os.kill(pid_of(server, "anchor"), signal.SIGKILL)

            others = seats(server)[1:]
            assert tokens(c.run_with(server, ASKS, c.in_decode, kill_both)) == expected
            c.wait_until(lambda: c.is_whole(server), 60, "full strength")
            assert seats(server)[1:] == others
        assert "Traceback" not in server.log_text(), server.log_text()
