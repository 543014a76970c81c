"""Servers (and a wheel) that several files of tests use one after the other: making one takes longer than most tests.

`SHARING` names the tests that share: the scheduler in conftest.py gives each group to one process.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from everserve.procs.local_server import LocalServer
from tests.support import cluster as c

# Beginnings of test ids, in the order in which they run: what leaves a server different, or ends it, comes last.
SHARING: dict[str, tuple[str, ...]] = {
    "cluster": (
        "tests/process/test_control_plane.py",
        "tests/process/test_embeddings.py",
        "tests/process/test_moves.py",
        "tests/process/test_supervisor_deaths.py",
        "tests/process/test_switching.py",
        "tests/serving/test_terminal.py::test_a_watcher_sees_a_kill",
        "tests/serving/test_whole_instance_ends.py",
    ),
    "tools": ("tests/process/test_tools.py", "tests/clients/test_under_kills.py"),
    "wheel": ("tests/wheel/test_cpu_levels.py", "tests/wheel/test_definition.py", "tests/wheel/test_wheel.py"),
    "small steps": ("tests/process/test_failover.py", "tests/process/test_restore.py"),
}
CLUSTER = ("--attention-workers", "2", "--expert-workers", "2", "--enable-chaos", *c.PATIENT)
TEMPLATE = Path(__file__).parent / "tools.jinja"
TOOLS = (*CLUSTER, "--chat-template", str(TEMPLATE), "--enable-auto-tool-choice")
CLUSTER_OF_SMALL_STEPS = (*CLUSTER, "--no-enable-prefix-caching", *c.SMALL_STEPS)


def group_of(test_id: str) -> str:
    """Tests of one group run in one process, one after the other: a file, or several that share a server."""
    for name, beginnings in SHARING.items():
        if test_id.startswith(beginnings):
            return name
    return test_id.split("::", maxsplit=1)[0]


class SharedServers:
    """One server at a time, which the next user gets if it has the same flags and is whole."""

    def __init__(self) -> None:
        self._flags: tuple[str, ...] = ()
        self._server: LocalServer | None = None

    @contextlib.contextmanager
    def lend(self, *flags: str) -> Iterator[LocalServer]:
        """To a user that leaves it whole, or ended; what goes wrong ends it, so that the next user gets another one."""
        if self._server is None or self._flags != flags or not _is_alive(self._server):
            self.close()
            self._server, self._flags = LocalServer("demo", *flags).__enter__(), flags
        server = self._server
        try:
            c.wait_whole(server)
            yield server
            assert "Traceback" not in server.log_text(), server.log_text()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.__exit__(None, None, None)


def _is_alive(server: LocalServer) -> bool:
    return server.process is not None and server.process.poll() is None
