"""The local provisioner: worker processes are forked from the zygote, each with its channels and its memory.

    Provision --> channels made --> ForkWorker --> WorkerForked --> WorkerStarted to the orchestrator,
                                                                    Attach to the gateway
                                                        ... --> WorkerExited to the orchestrator

The zygote has torch imported, so a new worker exists after milliseconds. If the zygote dies, a new one gets the forks
that are still pending. It may have spares, which are children of the supervisor too; the spares of a dead zygote are
killed.

The orchestrator may be replaced too. What the next one needs is kept here: each worker's cell and memory, and a
*lifeline* to it, through which the worker gets its channel to the new orchestrator. When a worker has exited, its
memory (a log, a seat's weights) is kept by name until the orchestrator drops it or another live worker has it: a seat's
weights have the same name in every incarnation, and seats with the same weights share them. Memory that was dropped may
be made again by the same name while workers still have what was dropped; so each of them is marked.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from everserve.procs import process
from everserve.procs.deferred_close import DeferredClose, Held
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.memory import Memory
from everserve.wire.channel import Channel
from everserve.wire.messages import (
    Attach,
    ForkWorker,
    FoundProcess,
    MemoryKept,
    OrchestratorAttached,
    Provision,
    Signalled,
    SignalWorker,
    StartWorker,
    WorkerExited,
    WorkerForked,
    WorkerStarted,
)

Send = Callable[..., None]  # (message, fds=()) -> None; does nothing if the receiver has ended

_TOKENS_BUFFER_BYTES = 4 << 20  # the streams of a lost worker, which another one reads between two steps


@dataclass
class _Order:
    """A worker that the zygote was asked to fork: its start message, its memory, and both ends of its channels."""

    start: StartWorker
    memory: list[int]  # its cell, and the memory that `start` lists
    control: tuple[socket.socket, socket.socket]  # orchestrator's end, worker's end
    lifeline: tuple[socket.socket, socket.socket]  # supervisor's end, worker's end
    tokens: tuple[socket.socket, socket.socket] | None  # gateway's end, worker's end
    dropped: set[Memory]  # of its memory

    @property
    def worker_fds(self) -> list[int]:
        cell_fd, *memory = self.memory
        tokens = [self.tokens[1].fileno()] if self.tokens is not None else []
        return [cell_fd, self.control[1].fileno(), self.lifeline[1].fileno(), *tokens, *memory]

    def close(self) -> None:
        for fd in self.memory:
            os.close(fd)
        for sock in (*self.control, *self.lifeline, *(self.tokens or ())):
            sock.close()


@dataclass
class _Process:
    """A worker that exists."""

    start: StartWorker
    pid: int
    memory: list[int]
    lifeline: Channel
    dropped: set[Memory]  # of its memory: not kept at its exit
    held: Held  # device descriptors that must outlast it
    rehearsed: Held | None = None  # those of the spare that it was, until it has sent its own

    def read(self) -> None:
        """Read the device descriptors that it has sent."""
        self.held.read()
        if self.rehearsed is not None:
            self.rehearsed.read()
        if self.rehearsed is not None and self.held.is_complete:
            self.rehearsed.let_go()
            self.rehearsed = None


@dataclass
class Workers:
    """Every worker process of this machine that exists or is being forked."""

    to_zygote: Send
    to_orchestrator: Send
    to_gateway: Send
    _processes: dict[WorkerId, _Process] = field(default_factory=dict)
    _orders: dict[WorkerId, _Order] = field(default_factory=dict)
    _kept: dict[Memory, int] = field(default_factory=dict)  # memory of exited workers that no live worker has
    _latest: dict[Rank, tuple[Incarnation, tuple[Role, ...]]] = field(default_factory=dict)
    _early_exits: dict[int, int] = field(default_factory=dict)  # statuses by pid, of processes not announced yet
    _spares: dict[int, Held] = field(default_factory=dict)  # by pid, until they end or become workers
    _deferred: DeferredClose = field(default_factory=DeferredClose)

    # -- starts ----------------------------------------------------------------------------------

    def provision(self, message: Provision, memory: list[int]) -> None:
        """Make the channels and ask the zygote to fork. Takes ownership of the descriptors."""
        self._latest[message.start.rank] = message.start.incarnation, message.start.roles
        self._ask(message.start, memory, set())

    def ask_again(self, own_pids: set[int]) -> None:
        """There is a new zygote. Kill processes that the old one forked and did not announce, and repeat the pending
        forks with new channels."""
        known = own_pids | {worker.pid for worker in self._processes.values()}
        for pid in process.children_of(os.getpid()):
            if pid not in known:
                os.kill(pid, signal.SIGKILL)
        owed, self._orders = self._orders, {}
        for order in owed.values():
            self._ask(order.start, [os.dup(fd) for fd in order.memory], order.dropped)
            order.close()

    def forked(self, message: WorkerForked) -> None:
        """The process exists: send its channels to the orchestrator and the gateway."""
        seat = WorkerId(message.rank, message.incarnation)
        order = self._orders.pop(seat)
        fds = [os.dup(fd) for fd in order.memory]
        lifeline = Channel(order.lifeline[0].dup())
        held = Held(f"worker {message.rank}", lifeline)
        rehearsed = self._spares.pop(message.pid, None)
        worker = _Process(order.start, message.pid, fds, lifeline, order.dropped, held, rehearsed)
        self._processes[seat] = worker
        for memory in worker.start.memory:
            if memory not in worker.dropped:
                self._let_go(memory)
        self._introduce(worker, order.control[0])
        if order.tokens is not None:
            attach = Attach(rank=message.rank, incarnation=message.incarnation)
            self.to_gateway(attach, fds=[order.tokens[0].fileno()])
        order.close()
        if message.pid in self._early_exits:
            self.exited(message.pid, self._early_exits.pop(message.pid))
        if not self._orders:
            self._early_exits.clear()

    def spare_forked(self, pid: int, lifeline: Channel) -> None:
        """The zygote has forked a spare, which now warms up on its device."""
        self._spares[pid] = Held(f"spare {pid}", lifeline, is_for_this=True)

    def kinds(self) -> tuple[StartWorker, ...]:
        """One start message for each kind of worker on each GPU."""
        starts = [worker.start for worker in self._processes.values()]
        starts += [order.start for order in self._orders.values()]
        return tuple({(start.gpu, start.roles): start for start in starts}.values())

    # -- a new orchestrator ----------------------------------------------------------------------

    def found(self) -> tuple[FoundProcess, ...]:
        """The worker processes that a new orchestrator starts from."""
        found = {seat: (worker.pid, worker.start.roles) for seat, worker in self._processes.items()}
        found |= {seat: (0, order.start.roles) for seat, order in self._orders.items()}
        for rank, (incarnation, roles) in self._latest.items():
            found.setdefault(WorkerId(rank, incarnation), (-1, roles))
        return tuple(
            FoundProcess(rank=rank, incarnation=incarnation, pid=pid, roles=roles)
            for (rank, incarnation), (pid, roles) in found.items()
        )

    def hand_over(self) -> None:
        """Send a new orchestrator a channel to every worker, and all kept memory."""
        for worker in self._processes.values():
            ours, theirs = Channel.pair()
            worker.lifeline.send(OrchestratorAttached(), fds=[theirs.fileno()])
            theirs.close()
            self._introduce(worker, ours)
            ours.close()
        for memory, fd in self._kept.items():
            self.to_orchestrator(MemoryKept(memory=memory), fds=[fd])

    def _introduce(self, worker: _Process, control: socket.socket) -> None:
        started = WorkerStarted(start=worker.start, pid=worker.pid, dropped=tuple(worker.dropped))
        self.to_orchestrator(started, fds=[control.fileno(), *worker.memory])

    def flush(self) -> None:
        """Call this regularly: writes and reads lifelines, closes what is due."""
        for worker in self._processes.values():
            worker.lifeline.flush()
            worker.read()
        for held in self._spares.values():
            held.read()
        self._deferred.tend()

    @property
    def is_held_back(self) -> bool:
        """Whether `flush` should be called again soon (`Channel.is_held_back`)."""
        return any(worker.lifeline.is_held_back for worker in self._processes.values())

    # -- exits ------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._processes.values()]

    def exited(self, pid: int, status: int) -> WorkerId | None:
        """A child that is a worker or a spare was reaped. Returns the worker if the zygote has announced it."""
        for seat, worker in self._processes.items():
            if worker.pid == pid:
                del self._processes[seat]
                cell_fd, *fds = worker.memory
                os.close(cell_fd)
                self._part(worker)
                for memory, fd in zip(worker.start.memory, fds, strict=True):
                    if memory in worker.dropped or self._lives_on(memory):
                        os.close(fd)
                    else:
                        self._kept[memory] = fd
                self.to_orchestrator(WorkerExited(rank=seat[0], incarnation=seat[1], exit_status=status))
                return seat
        if (held := self._spares.pop(pid, None)) is not None:
            self._deferred.close_later(held)
        if self._orders:  # it may be one of these; otherwise it was a spare, and its pid may be reused
            self._early_exits[pid] = status
        return None

    def _part(self, worker: _Process) -> None:
        for held in (worker.held, worker.rehearsed):
            if held is not None and worker.start.settings.compute.device == "cuda":
                self._deferred.close_later(held)
            elif held is not None:
                held.let_go()

    def drop(self, memory: Memory) -> None:
        """This memory is not needed any more. Workers that have it may not have ended yet, or not have begun."""
        self._let_go(memory)
        holders: list[_Order | _Process] = [*self._orders.values(), *self._processes.values()]
        for holder in holders:
            if memory in holder.start.memory:
                holder.dropped.add(memory)

    def _lives_on(self, memory: Memory) -> bool:
        """Whether a live worker has it, and would hand it over to a new orchestrator."""
        workers = self._processes.values()
        return any(memory in worker.start.memory and memory not in worker.dropped for worker in workers)

    def _let_go(self, memory: Memory) -> None:
        if (fd := self._kept.pop(memory, None)) is not None:
            os.close(fd)

    def signal(self, message: SignalWorker) -> None:
        """Signal exactly this incarnation: its pid cannot be reused before the supervisor reaps it."""
        worker = self._processes.get(WorkerId(message.rank, message.incarnation))
        if worker is not None:
            os.kill(worker.pid, message.signal)
        if message.id is not None:
            reason = "" if worker is not None else f"worker {message.rank} has no process at the moment"
            pid = worker.pid if worker is not None else None
            self.to_orchestrator(Signalled(id=message.id, pid=pid, reason=reason))

    def kill_all(self) -> None:
        """Kill every worker, wait for its exit, and close everything."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)
        for worker in self._processes.values():
            _close(worker.memory)
            self._part(worker)
        for held in self._spares.values():
            held.let_go()
        self._spares.clear()
        self._deferred.close()
        self._processes.clear()
        for order in self._orders.values():
            order.close()
        self._orders.clear()
        _close(self._kept.values())
        self._kept.clear()

    def _ask(self, start: StartWorker, memory: list[int], dropped: set[Memory]) -> None:
        tokens = Channel.pair(_TOKENS_BUFFER_BYTES) if Role.ATTENTION in start.roles else None
        order = _Order(start, memory, Channel.pair(), Channel.pair(), tokens, dropped)
        self._orders[WorkerId(start.rank, start.incarnation)] = order
        self.to_zygote(ForkWorker(start=start), fds=order.worker_fds)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
