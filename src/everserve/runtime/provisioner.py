"""Workers on this machine: forked from a warm zygote, signalled and mourned by the supervisor, whose children they are.

    Provision --> ForkWorker to the zygote --> WorkerForked --> WorkerStarted to the orchestrator, Attach to the gateway
                                                        ... --> WorkerExited to the orchestrator

The zygote has torch imported and nothing else to do, so a new worker exists after milliseconds. If the zygote dies, a
new one gets the forks that it still owed.
"""

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from everserve.runtime import process
from everserve.runtime.channel import Channel
from everserve.runtime.messages import (
    Attach,
    ForkWorker,
    Provision,
    Signalled,
    SignalWorker,
    StartWorker,
    WorkerExited,
    WorkerForked,
    WorkerStarted,
)
from everserve.tables.ids import Incarnation, Rank, Role

Send = Callable[..., None]  # (message, fds=()) -> None; does nothing if the receiver is gone
Seat = tuple[Rank, Incarnation]


@dataclass
class _Birth:
    """A worker that the zygote was asked for: what it shall be, and both ends of its channels."""

    start: StartWorker
    cell_fd: int
    control: tuple[socket.socket, socket.socket]  # orchestrator's end, worker's end
    tokens: tuple[socket.socket, socket.socket] | None  # gateway's end, worker's end

    def close(self) -> None:
        os.close(self.cell_fd)
        for sock in (*self.control, *(self.tokens or ())):
            sock.close()


@dataclass
class Workers:
    """Every worker process of this machine that exists or is about to."""

    to_zygote: Send
    to_orchestrator: Send
    to_gateway: Send
    pids: dict[Seat, int] = field(default_factory=dict)
    _births: dict[Seat, _Birth] = field(default_factory=dict)
    _early_exits: dict[int, int] = field(default_factory=dict)  # of processes that we have not been told about yet

    def provision(self, message: Provision, cell_fd: int) -> None:
        """Make the channels and ask the zygote."""
        self._ask(message.start, cell_fd)

    def ask_again(self, own_pids: set[int]) -> None:
        """There is a new zygote. What the old one may have forked without telling is nobody's: end it, and begin again
        with new channels."""
        for pid in process.children_of(os.getpid()):
            if pid not in own_pids and pid not in self.pids.values():
                os.kill(pid, signal.SIGKILL)
        owed, self._births = self._births, {}
        for birth in owed.values():
            self._ask(birth.start, os.dup(birth.cell_fd))
            birth.close()

    def forked(self, message: WorkerForked) -> None:
        """The process exists: tell those who talk to it."""
        seat = (message.rank, message.incarnation)
        birth = self._births.pop(seat)
        self.pids[seat] = message.pid
        started = WorkerStarted(rank=message.rank, incarnation=message.incarnation, pid=message.pid)
        self.to_orchestrator(started, fds=[birth.control[0].fileno()])
        if birth.tokens is not None:
            attach = Attach(rank=message.rank, incarnation=message.incarnation)
            self.to_gateway(attach, fds=[birth.tokens[0].fileno()])
        birth.close()
        if message.pid in self._early_exits:
            self.exited(message.pid, self._early_exits.pop(message.pid))

    def exited(self, pid: int, status: int) -> Seat | None:
        """A child that is not one of the supervisor's own was reaped; returns whose seat that was, if known already."""
        for seat, known in self.pids.items():
            if known == pid:
                del self.pids[seat]
                self.to_orchestrator(WorkerExited(rank=seat[0], incarnation=seat[1], exit_status=status))
                return seat
        self._early_exits[pid] = status
        return None

    def signal(self, message: SignalWorker) -> None:
        """Send a signal to exactly this incarnation: its pid is ours until we reap it, so it cannot be anybody else."""
        pid = self.pids.get((message.rank, message.incarnation))
        if pid is not None:
            os.kill(pid, message.signal)
        if message.id is not None:
            reason = "" if pid is not None else f"worker {message.rank} has no process at the moment"
            self.to_orchestrator(Signalled(id=message.id, pid=pid, reason=reason))

    def kill_all(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for birth in self._births.values():
            birth.close()
        self._births.clear()

    def _ask(self, start: StartWorker, cell_fd: int) -> None:
        tokens = Channel.pair() if Role.ATTENTION in start.roles else None
        birth = _Birth(start, cell_fd, Channel.pair(), tokens)
        self._births[start.rank, start.incarnation] = birth
        ends = [birth.control[1]] + ([tokens[1]] if tokens is not None else [])
        self.to_zygote(ForkWorker(start=start), fds=[cell_fd, *(sock.fileno() for sock in ends)])
