"""An instance whose processes are played by the test: what the supervisor starts only waits to be told how to end, and
the ends of its channels are the test's. Workers only sleep."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest

from everserve.config.cluster import ClusterConfig
from everserve.config.gateway import GatewayConfig
from everserve.procs import process
from everserve.procs import supervisor as supervisor_module
from everserve.procs.early_zygote import EarlyZygote
from everserve.procs.signals import SignalPipe
from everserve.procs.supervisor import Supervisor
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.memory import Kind, Memory
from everserve.wire.channel import Channel, Frame
from everserve.wire.messages import (
    AnyMessage,
    ForkWorker,
    Provision,
    Ready,
    StartGateway,
    StartOrchestrator,
    StartWorker,
    WorkerForked,
)
from tests.configs import worker_settings

SETTINGS = worker_settings()
START_GATEWAY = StartGateway(config=GatewayConfig(model="m", served_model_names=["m"]))
START_ORCHESTRATOR = StartOrchestrator(cluster=ClusterConfig(detect_ms=0.0), worker=SETTINGS)
_WITHIN_S = 60.0
_Message = TypeVar("_Message", bound=AnyMessage)


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def new_memory(num_bytes: int) -> int:
    fd = os.memfd_create("m")
    os.ftruncate(fd, num_bytes)
    return fd


def size_of(fd: int) -> int:
    """Of memory that came along, which is closed."""
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def are_connected(one: Channel, other: Channel) -> bool:
    one.send(Ready())
    return other.receive(timeout_s=_WITHIN_S) == Ready()


class Played:
    """One process of the supervisor."""

    def __init__(self, name: str, sockets: Mapping[str, socket.socket]) -> None:
        self.name = name
        self.process = subprocess.Popen(["sh", "-c", "read status; exit $status"], stdin=subprocess.PIPE, bufsize=0)
        ends = {flag: sock.dup() for flag, sock in sockets.items()}
        self.control = Channel(ends.pop("--control-fd"))
        self.sockets = ends
        self.received: list[Frame] = []

    def read(self) -> None:
        self.received += self.control.receive_frames()

    def messages(self, kind: type[_Message]) -> list[_Message]:
        """All so far of this kind."""
        self.read()
        return [frame.message for frame in self.received if isinstance(frame.message, kind)]

    def fds_of(self, kind: type[AnyMessage], index: int = -1) -> list[int]:
        """Those that came with the last message of this kind, or with another one; the caller's from now on."""
        self.read()
        return [frame for frame in self.received if isinstance(frame.message, kind)][index].fds.take()

    def channel_of(self, kind: type[AnyMessage]) -> Channel:
        (fd,) = self.fds_of(kind)
        return Channel.of_fd(fd)

    def exit(self, status: int = 0) -> None:
        """It has ended when this returns, unless it is about to be killed."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(b"%d\n" % status)
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self.control.close()

    def close(self) -> None:
        self.control.close()
        self.received.clear()
        for sock in self.sockets.values():
            sock.close()
        assert self.process.stdin is not None
        self.process.stdin.close()


class Instance:
    """The supervisor, one turn of its loop at a time, and all that it has started."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        grace_s: float = 7.0,
        num_spares: int = 0,
        early: Sequence[EarlyZygote] = (),
    ) -> None:
        self.played: dict[str, list[Played]] = {}
        self.workers: list[int] = []
        self.said_ready: list[str] = []
        self._later_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self._later_s)
        monkeypatch.setattr(supervisor_module, "time", clock)
        # This process may have other children, of other tests.
        monkeypatch.setattr(process, "children_of", lambda pid: [p for p in self._pids() if process.state_of(p)])
        with socket.create_server(("127.0.0.1", 0)) as listen:
            self.address = listen.getsockname()
            self.supervisor = Supervisor(
                listen,
                START_GATEWAY,
                START_ORCHESTRATOR,
                grace_s,
                None,
                self.said_ready.append,
                num_spares=num_spares,
                take_zygote=partial(next, iter(early), None),
                launch=self._launch,
            )
            self._signals = SignalPipe(self.supervisor._selector)
            self.supervisor._spawn_all()

    def _launch(
        self, name: str, sockets: Mapping[str, socket.socket], environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        self.played.setdefault(name, []).append(Played(name, sockets))
        return self.played[name][-1].process

    def _pids(self) -> list[int]:
        return [one.process.pid for all_of_it in self.played.values() for one in all_of_it] + self.workers

    def __getitem__(self, name: str) -> Played:
        """The latest."""
        return self.played[name][-1]

    @property
    def is_over(self) -> bool:
        return not self.supervisor._children and not self.supervisor._workers.pids

    @property
    def outcome(self) -> tuple[int, str | None]:
        """Its exit status, and what it says about the end."""
        return self.supervisor._exit_status, self.supervisor._failure

    def until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + _WITHIN_S
        while not condition():
            assert time.monotonic() < deadline_s, "it does not happen"
            self.turn()

    def turn(self) -> None:
        self.supervisor._step(self._signals)

    def serve(self) -> None:
        for name in ("gateway", "orchestrator"):
            self[name].control.send(Ready())
        self.until(lambda: self.said_ready)

    def get(self, name: str, kind: type[_Message], num: int = 1) -> _Message:
        """The last of so many messages of this kind to the latest process of that name."""
        self.until(lambda: len(self[name].messages(kind)) >= num)
        return self[name].messages(kind)[num - 1]

    def die(self, name: str, status: int = 0) -> None:
        """And the supervisor has replaced it."""
        before = len(self.played[name])
        self[name].exit(status)
        self.until(lambda: len(self.played[name]) > before)

    def pass_time(self, seconds: float) -> None:
        self._later_s += seconds

    def signal(self, signum: signal.Signals) -> None:
        """To the supervisor."""
        os.kill(os.getpid(), signum)

    def provision(self, incarnation: int = 1, sizes: tuple[int, ...] = (1, 10)) -> None:
        """The orchestrator asks for a worker with a cell and a log of these sizes."""
        memory = [new_memory(size) for size in sizes]
        self["orchestrator"].control.send(Provision(start=start_worker(incarnation)), fds=memory)
        for fd in memory:
            os.close(fd)

    def fork(self, num_asked: int = 1) -> int:
        """The zygote does what it was asked for last; returns the worker's pid."""
        start = self.get("zygote", ForkWorker, num_asked).start
        pid = os.posix_spawnp("sleep", ["sleep", "1000"], os.environ)
        self.workers.append(pid)
        self["zygote"].control.send(WorkerForked(rank=start.rank, incarnation=start.incarnation, pid=pid))
        self.until(lambda: pid in self.supervisor._workers.pids)
        return pid

    def close(self) -> None:
        self.supervisor._kill_everything()
        self._signals.close()
        for child in self.supervisor._children.values():
            child.control.close()
        self.supervisor._selector.close()
        for all_of_it in self.played.values():
            for one in all_of_it:
                one.close()


def make_zygote() -> tuple[Played, EarlyZygote]:
    """One that was started before the supervisor."""
    ours, theirs = Channel.pair()
    with theirs:
        played = Played("zygote", {"--control-fd": theirs})
    return played, EarlyZygote(played.process, ours)


def log_of(incarnation: int) -> Memory:
    owner = WorkerId(Rank(0), Incarnation(incarnation))
    return Memory(kind=Kind.LOG, owners=(owner,), num_bytes=10)


def start_worker(incarnation: int = 1) -> StartWorker:
    return StartWorker(
        rank=Rank(0),
        incarnation=Incarnation(incarnation),
        roles=(Role.ATTENTION,),
        settings=SETTINGS,
        num_workers=1,
        slots=None,
        detect_ms=0.0,
        memory=(log_of(incarnation),),
    )
