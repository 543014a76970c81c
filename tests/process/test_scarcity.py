"""The kernel gives no process, or no descriptor, for a while: what dies meanwhile is replaced when it does again, and
streams go on. The limits are real, and set on a server that runs."""

import os
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from everserve.procs.local_server import LocalServer
from everserve.procs.process import children_of
from tests.support import cluster as c
from tests.support.shared_servers import CLUSTER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")

STREAMS = c.asks(6, num_prompt=20, max_tokens=240)
HELPERS = ("orchestrator", "anchor", "zygote")
PIDS = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]  # of the first version and of the second


@pytest.fixture(scope="module")
def expected(server):
    return c.right_answers(server, STREAMS)


@pytest.fixture(scope="module")
def shared(shared_servers):
    with shared_servers.lend(*CLUSTER) as running:
        yield running
        assert running.process.poll() is None, running.log_text()


@contextmanager
def limited(pids: list[int], what: int, most: int) -> Iterator[None]:
    before = {pid: resource.prlimit(pid, what) for pid in pids}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, what, (most, hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, what, limits)


def no_descriptors(server: LocalServer) -> AbstractContextManager[None]:
    """Of those who start others."""
    return limited(starters(server), resource.RLIMIT_NOFILE, most=3)


def starters(server: LocalServer) -> list[int]:
    return [pid_of(server, name) for name in ("root", "supervisor", "zygote")]


def no_processes(server: LocalServer) -> AbstractContextManager[None]:
    """Root has no such limit, but can have a cgroup."""
    if os.getuid() != 0:
        return limited(starters(server), resource.RLIMIT_NPROC, most=1)
    return in_cgroup(server)


@contextmanager
def in_cgroup(server: LocalServer) -> Iterator[None]:
    parent = next((path for path in PIDS if (path / "cgroup.procs").exists()), PIDS[0])
    group = parent / f"everserve-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup: {error}")
    try:
        try:
            (group / "pids.max").write_text("1")
            move(group, [server.process.pid, *children_of(server.process.pid)])
        except OSError as error:
            pytest.skip(f"a cgroup cannot limit processes here: {error}")
        yield
    finally:
        while left := (group / "cgroup.procs").read_text().split():
            move(parent, map(int, left))
        group.rmdir()


def move(group: Path, pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def pid_of(server: LocalServer, name: str) -> int:
    return next((p["pid"] for p in c.cluster(server)["processes"] if p["name"] == name), 0)


@pytest.mark.parametrize("limit", [no_descriptors, no_processes])
def test_what_dies_is_replaced_when_it_can_be(whole, expected, limit):
    """An expert worker and an attention worker, and all that decide, own or fork."""
    server, workers = whole, {rank: c.worker(whole, rank)["incarnation"] for rank in (0, 3)}
    doomed = [c.worker(server, rank)["pid"] for rank in workers] + [pid_of(server, name) for name in HELPERS]
    num_fds = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    log_before = len(server.log_text())

    def act() -> None:
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        c.wait_until(lambda: not any(map(c.is_alive, doomed)), what="their deaths")
        c.wait_until(lambda: " now: [Errno " in server.log_text()[log_before:], what="a start that fails")

    with limit(server):
        c.assert_equal(c.run_with(server, STREAMS, c.in_decode, act), expected)
        c.wait_until(lambda: not any(pid_of(server, name) for name in HELPERS), what="their ends to be told")
        assert server.process.poll() is None
    for name in HELPERS:
        c.wait_until(lambda name=name: pid_of(server, name) not in (0, *doomed), what=f"a new {name}")
    for rank, incarnation in workers.items():
        c.wait_until(lambda r=rank, i=incarnation: c.worker(server, r)["incarnation"] > i, what=f"a new worker {rank}")
    c.wait_whole(server)
    assert c.run_all(server, STREAMS) == expected
    log = server.log_text()[log_before:]
    assert 1 <= log.count("cannot start the ") <= 2 and "Traceback" not in log, log
    c.wait_until(lambda: len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) == num_fds, what="no leak")
