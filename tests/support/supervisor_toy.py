"""An instance whose processes are played by the test: what the supervisor starts only waits to be told how to end, and
the ends of its channels are the test's. Workers only sleep. Root is played, too, and supervisors die as by SIGKILL."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
from msgspec.structs import replace

from everserve.config.cluster import ClusterConfig
from everserve.config.events import EventLogConfig
from everserve.config.gateway import GatewayConfig
from everserve.procs import children, keepers, process, provisioner, service_manager, steps, upgrading
from everserve.procs import process_table as table_of
from everserve.procs import supervisor as supervisor_module
from everserve.procs.early_zygote import EarlyZygote
from everserve.procs.keepers import GatewayMemory
from everserve.procs.listening import url_of
from everserve.procs.process_table import TableFile
from everserve.procs.signals import SignalPipe
from everserve.procs.supervisor import Supervisor
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.members import gateway_name
from everserve.tables.memory import Kind, MemoryName
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
from tests.support.configs import worker_settings

SETTINGS = worker_settings()
START_GATEWAY = StartGateway(config=GatewayConfig(model="m", served_model_names=["m"]))
START_ORCHESTRATOR = StartOrchestrator(cluster=ClusterConfig(detect_ms=0.0), worker=SETTINGS)
_WITHIN_S = 60.0
_Message = TypeVar("_Message", bound=AnyMessage)


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

    def __init__(self, name: str, fds: Mapping[str, int]) -> None:
        self.name = name
        self.process = subprocess.Popen(["sh", "-c", "read status; exit $status"], stdin=subprocess.PIPE, bufsize=0)
        ends = {
            flag: socket.socket(fileno=os.dup(fd))
            for flag, fd in fds.items()
            if flag not in ("--ledger-fd", "--table-fd")
        }
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
        if self.process.returncode is None:  # root may know already
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self.control.close()

    def kill(self, is_outlived: bool = False) -> None:
        """By a signal; its end is known when this returns. `is_outlived`: by its gateway, which has the channel."""
        self.process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        if not is_outlived:
            self.control.close()

    def close(self) -> None:
        self.control.close()
        self.received.clear()
        for sock in self.sockets.values():
            sock.close()
        assert self.process.stdin is not None
        self.process.stdin.close()


class PlayedRoot:
    """What a supervisor sees of root (procs/root_end.py)."""

    def __init__(self, instance: "Instance") -> None:
        self._instance = instance
        self.table_fd = os.memfd_create("process-table")
        self.root_pid = os.getpid()
        self.stops: tuple[int, ...] = ()
        self.before: int | None = None
        self.news = ""
        self.has_exits = False
        self.status: int | None = None  # of the instance, when that is over
        self.left: set[int] = set()  # open descriptors of supervisors that have died
        self._quiet, self._other = socket.socketpair()

    def fileno(self) -> int:
        return self._quiet.fileno()

    def start(self, name: str, fds: Mapping[str, int], environment: Mapping[str, str]) -> int:
        return self._instance.launch(name, fds)

    def exits(self) -> Iterator[tuple[int, int]]:
        popen = {one.process.pid: one.process for all_of_it in self._instance.played.values() for one in all_of_it}
        children = {child.pid for child in self._instance.supervisor._children.values() if child.status is None}
        for pid in (children | popen.keys()) - set(self._instance.workers):
            if pid in popen:
                if popen[pid].returncode is None and popen[pid].poll() is not None:
                    yield pid, popen[pid].returncode
            else:
                yield from self._wait(pid)
        for pid in list(self._instance.workers):
            for exit in self._wait(pid):
                self._instance.workers.remove(pid)
                yield exit

    def _wait(self, pid: int) -> list[tuple[int, int]]:
        with suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            return [(pid, os.waitstatus_to_exitcode(status))] if ended else []
        return []

    def wait(self, timeout_s: float) -> None:
        time.sleep(0.001)

    def children(self) -> list[int]:
        return [pid for pid in self._instance.pids() if process.state_of(pid)]

    def close_others(self, named: frozenset[int]) -> None:
        for fd in self.left - named:
            os.close(fd)
        self.left = set()

    def pulse(self, now: float) -> None:
        pass

    def tell(self, *assignments: str) -> None:
        service_manager.tell(*assignments)

    def done(self, status: int) -> None:
        self.status = status

    @property
    def own_fds(self) -> tuple[int, ...]:
        return self.table_fd, self._quiet.fileno(), self._other.fileno()

    def close(self) -> None:
        os.close(self.table_fd)
        self._quiet.close()
        self._other.close()


class Instance:
    """The supervisor, one turn of its loop at a time, and all that it has started."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        grace_s: float = 7.0,
        num_spares: int = 0,
        early: Sequence[EarlyZygote] = (),
        start_orchestrator: StartOrchestrator = START_ORCHESTRATOR,
        num_gateways: int = 1,
    ) -> None:
        self.played: dict[str, list[Played]] = {}
        self.gateways = [gateway_name(number) for number in range(num_gateways)]
        self.workers: list[int] = []
        self.said_ready: list[str] = []
        self._later_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self._later_s, sleep=time.sleep)
        for module in (supervisor_module, children, keepers, steps, upgrading, provisioner):
            monkeypatch.setattr(module, "time", clock)
        with socket.create_server(("127.0.0.1", 0)) as listen:
            self.address = listen.getsockname()
            told = table_of.Instance(
                model="m",
                url=url_of(listen),
                start_gateway=StartGateway(config=replace(START_GATEWAY.config, gateways=num_gateways)),
                start_orchestrator=start_orchestrator,
                grace_s=grace_s,
                event_log=EventLogConfig(),
                environment=dict(os.environ),
                num_spares=num_spares,
            )
            self.root = PlayedRoot(self)
            take = partial(next, iter(early), None)
            memory = GatewayMemory.new(listen.detach(), told.start_gateway.config)
            self.supervisor = Supervisor(told, self.root, memory, self.said_ready.append, take)
        self._signals = SignalPipe(self.supervisor._selector)
        self.supervisor._record()
        self.supervisor._spawn_all()

    def launch(self, name: str, fds: Mapping[str, int]) -> int:
        self.played.setdefault(name, []).append(Played(name, fds))
        return self.played[name][-1].process.pid

    def replace_supervisor(self, left: Collection[int] = (), status: int = -signal.SIGKILL) -> None:
        """The supervisor dies, and the next one goes on. What it had open stays open, under the same numbers. `left`:
        more than its objects have, if it died in the middle of something."""
        before = self.supervisor
        self._signals.close()
        before._selector.close()
        self.root.left, self.root.before = abandon(before), status
        self.root.left |= {fd for fd in left if is_open(fd)}
        found = TableFile(self.root.table_fd).read()
        assert found is not None
        told = table_of.decode(found.instance, table_of.Instance)
        self.root.close_others(found.descriptors())
        memory = GatewayMemory(found.listen, found.ledgers, found.shared)
        self.supervisor = Supervisor(told, self.root, memory, self.said_ready.append)
        self.supervisor._restore(found)
        self._signals = SignalPipe(self.supervisor._selector)
        self.supervisor._take_over()

    def pids(self) -> list[int]:
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

    def second(self) -> None:
        """Passes, and the supervisor looks what is due; at once, because a signal comes."""
        self.pass_time(1.0)
        self.signal(signal.SIGCHLD)
        self.turn()

    def serve(self) -> None:
        for name in (*self.gateways, "orchestrator"):
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
        self.supervisor._keepers.memory.close()
        self.root.close()
        for all_of_it in self.played.values():
            for one in all_of_it:
                one.close()


def make_zygote() -> tuple[Played, EarlyZygote]:
    """One that was started before the supervisor."""
    ours, theirs = Channel.pair()
    with theirs:
        played = Played("zygote", {"--control-fd": theirs.fileno()})
    return played, EarlyZygote(played.process.pid, ours.detach())


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink()


def abandon(supervisor: Supervisor) -> set[int]:
    """Take from its objects what they would close when they are gone. Returns these descriptors."""
    left: list[int] = [supervisor._keepers.memory.listen]
    workers = supervisor._workers
    channels = [child.control for child in supervisor._children.values()]
    held = [child.held for child in supervisor._children.values()] + list(workers._spares.values())
    held += [one for _, one in (*workers._deferred._ended, *supervisor._children.deferred._ended)]
    for worker in workers._processes.values():
        left += [*worker.memory, *worker.tokens.values()]
        held += [worker.held, *([worker.rehearsed] if worker.rehearsed is not None else [])]
    for order in workers._orders.values():
        left += order.memory
        sockets = (*(order.control or ()), *(order.lifeline or ()), *(end for pair in order.tokens for end in pair))
        left += [sock.detach() for sock in sockets]
    left += workers._kept.values()
    channels += [one.lifeline for one in held if one.lifeline is not None]
    for one in held:
        left += [fd for fds in (*one._held, *one._arriving) for fd in fds.take()]
    for channel in channels:
        left += [fd for batch in channel._batches for fd in batch.fds.take()]
        left += [fd for _, fds in channel._outgoing for fd in fds]
        channel._outgoing.clear()
        if channel.fileno() != -1:
            left.append(channel.sock.detach())
    return set(left)


def log_of(incarnation: int) -> MemoryName:
    owner = WorkerId(Rank(0), Incarnation(incarnation))
    return MemoryName(kind=Kind.LOG, owners=(owner,), num_bytes=10)


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
