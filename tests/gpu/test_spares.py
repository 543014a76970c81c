"""Spares on a GPU: they are ready with the device open, take seats as they are, and harm nobody."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everserve.client import Stream
from everserve.procs import process
from everserve.procs.local_server import LocalServer
from tests.gpu.needs import SERVER
from tests.support import cluster as c

pytestmark = [*SERVER, pytest.mark.timeout(300)]
SETUPS = [("1", "0"), ("1", "2")]  # attention and expert workers


@pytest.fixture(scope="module", params=SETUPS, ids="-".join)
def servers(request) -> Iterator[dict[str, LocalServer]]:
    """The same cluster without spares, and with one."""
    attention, expert = request.param
    flags = ["--device", "cuda", "--attention-workers", attention, "--expert-workers", expert, "--enable-chaos"]
    flags += ["--kv-cache-memory-bytes", str(1 << 30)]  # two of them share the device
    with (
        LocalServer("demo", *flags, "--spares", "0") as without,
        LocalServer("demo", *flags, "--spares", "1") as with_one,
    ):
        yield {"without": without, "with": with_one}
        for server in (without, with_one):
            assert "Traceback" not in server.log_text(), server.log_text()


def replace(server: LocalServer, rank: int) -> tuple[int, float]:
    """Kill it; the pid of its successor, and how long that took from its first instruction in this seat."""
    c.wait_whole(server)
    old = c.worker(server, rank)
    os.kill(old["pid"], signal.SIGKILL)
    c.wait_until(lambda: c.worker(server, rank)["incarnation"] > old["incarnation"], 60, "a successor")
    c.wait_until(lambda: c.is_whole(server), 60, "full strength")
    new = c.worker(server, rank)
    ready = [e for e in server.events() if e["event"] == "worker_became_ready" and e["rank"] == rank]
    return new["pid"], next(e["load_s"] for e in ready if e["incarnation"] == new["incarnation"])


def wait_spare(server: LocalServer) -> int:
    c.wait_until(lambda: c.cluster(server)["spares"]["ready"] == 1, 60, "a spare")
    return next(p["pid"] for p in c.cluster(server)["processes"] if p["name"] == "spare-0")


def test_a_spare_has_the_device_open_before_it_has_a_seat(servers):
    """Which a worker that is forked when it is needed does first. How much sooner every kind of worker is ready is
    printed: the best of three, since others use the device too."""
    pids = {process["name"]: process["pid"] for process in c.cluster(servers["without"])["processes"]}
    assert not has_device_open(pids["zygote"]), "what a worker without a spare begins as"
    for rank in range(len(c.cluster(servers["with"])["workers"])):
        forked_s, from_spare_s = [], []
        for _ in range(3):
            forked_s.append(replace(servers["without"], rank)[1])
            spare = wait_spare(servers["with"])
            assert has_device_open(spare)
            pid, load_s = replace(servers["with"], rank)
            assert pid == spare
            from_spare_s.append(load_s)
        print(f"rank {rank}: {min(forked_s):.3f} s without a spare, {min(from_spare_s):.3f} s with one")


def has_device_open(pid: int) -> bool:
    return any(str(path.readlink()).startswith("/dev/nvidia") for path in Path(f"/proc/{pid}/fd").iterdir())


def test_the_same_tokens(servers):
    """Also from a worker that was a spare."""
    expected = c.run_all(servers["without"], c.DECODE)
    wait_spare(servers["with"])
    replace(servers["with"], 0)
    assert c.run_all(servers["with"], c.DECODE) == expected


def test_a_spare_that_dies_while_it_rehearses_harms_nobody(servers):
    """It shares the device with workers in the middle of their streams, and has launched kernels of its own."""
    server = servers["with"]
    expected = c.run_all(server, c.DECODE)
    before = [(worker["pid"], worker["incarnation"]) for worker in c.cluster(server)["workers"]]
    rehearsal_s = time_rehearsal(server)
    end(wait_spare(server))  # the next one follows after two seconds; then after 4, 8, 16
    for part in (0.7, 0.1, 0.4):
        c.wait_until(lambda: rehearsing(server), 60, "a rehearsal")
        time.sleep(part * rehearsal_s)
        streams, killed = kill_under_load(server)
        c.assert_equal(streams, expected)
        assert killed, f"the rehearsal was over before {part} of {rehearsal_s:.2f} s"
    wait_spare(server)
    assert [(worker["pid"], worker["incarnation"]) for worker in c.cluster(server)["workers"]] == before


def time_rehearsal(server: LocalServer) -> float:
    end(wait_spare(server))
    c.wait_until(lambda: rehearsing(server), 60, "a rehearsal")
    began = time.monotonic()
    wait_spare(server)
    return time.monotonic() - began


def rehearsing(server: LocalServer) -> list[int]:
    """Spares that are not ready yet."""
    ready = {p["pid"] for p in c.cluster(server)["processes"] if p["name"].startswith("spare-")}
    return [pid for pid in process.children_of(server.process.pid) if pid not in ready and is_named(pid, "es-spare")]


def kill_under_load(server: LocalServer) -> tuple[list[Stream], list[int]]:
    """The streams, and who rehearsed in their middle and was killed."""
    killed: list[int] = []

    def kill() -> None:
        for pid in rehearsing(server):
            end(pid)
            killed.append(pid)

    return c.run_with(server, c.DECODE, c.in_decode, kill), killed


def end(pid: int) -> None:
    """Kill it; back when it is gone, which takes a while with a device."""
    os.kill(pid, signal.SIGKILL)
    c.wait_until(lambda: not c.is_alive(pid), 30, f"the end of {pid}")


def is_named(pid: int, name: str) -> bool:
    try:
        return c.is_alive(pid) and Path(f"/proc/{pid}/comm").read_text().strip() == name
    except (FileNotFoundError, ProcessLookupError):
        return False
