"""The local provisioner: worker processes are forked from the zygote, each with its channels and its memory.

    Provision --> channels made --> ForkWorker --> WorkerForked --> WorkerStarted to the orchestrator,
                                                                    Attach to the gateways
                                                        ... --> WorkerExited to the orchestrator

The zygote has torch imported, so a new worker exists after milliseconds. If the zygote dies, a new one gets the forks
that are still pending. It may have spares, which are children of root as all processes; the spares of a dead zygote are
killed.

The orchestrator may be replaced too. What the next one needs is kept here: each worker's cell and memory, and a
*lifeline* to it, through which the worker gets its channel to the new orchestrator. When a worker has exited, its
memory (a log, a seat's weights) is kept by name until the orchestrator drops it or another live worker has it: a seat's
weights have the same name in every incarnation, and seats with the same weights share them. Memory that was dropped may
be made again by the same name while workers still have what was dropped; so each of them is marked.

Descriptors may be short (scarcity.py). Then what was asked for waits here with its memory, and is tried again.

All of this is in the process table, too, from which the next supervisor goes on (process_table.py).
"""

import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from msgspec import Raw

from everserve.procs.deferred_close import DeferredClose, Held
from everserve.procs.process_table import OrderRow, WorkerRow, WorkersTable, encode, start_of
from everserve.procs.scarcity import Retry
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.memory import MemoryName
from everserve.wire.channel import Channel
from everserve.wire.messages import (
    AnyMessage,
    Attach,
    ForkWorker,
    FoundProcess,
    Offer,
    OrchestratorAttached,
    Provision,
    Signalled,
    SignalWorker,
    StartWorker,
    TokensAttached,
    WorkerExited,
    WorkerForked,
    WorkerStarted,
)

Send = Callable[..., None]  # (message, fds=()) -> None; does nothing if the receiver has ended

log = logging.getLogger(__name__)

_TOKENS_BUFFER_BYTES = 4 << 20  # the streams of a lost worker, which another one reads between two steps


@dataclass
class _Order:
    """A worker that is to be forked: its start message, its memory, and once the zygote was asked, both ends of its
    channels."""

    start: StartWorker
    encoded: Raw  # the same, for the process table
    memory: list[int]  # its cell, and the memory that `start` lists
    dropped: set[MemoryName]  # of its memory
    control: tuple[socket.socket, socket.socket] | None = None  # orchestrator's end, worker's end
    lifeline: tuple[socket.socket, socket.socket] | None = None  # supervisor's end, worker's end
    tokens: list[tuple[socket.socket, socket.socket]] = field(default_factory=list)  # gateway's end, worker's end

    @property
    def is_asked(self) -> bool:
        return self.control is not None

    def connect(self, num_gateways: int) -> None:
        """Make its channels; all, or none."""
        with ExitStack() as made:

            def pair(buffer_bytes: int | None = None, are_packets: bool = False) -> tuple[socket.socket, socket.socket]:
                ends = Channel.pair(buffer_bytes, are_packets)
                for end in ends:
                    made.enter_context(end)
                return ends

            num_tokens = num_gateways if Role.ATTENTION in self.start.roles else 0
            tokens = [pair(_TOKENS_BUFFER_BYTES) for _ in range(num_tokens)]
            control, lifeline = pair(), pair(are_packets=True)
            self.control, self.lifeline, self.tokens = control, lifeline, tokens
            made.pop_all()

    @property
    def worker_fds(self) -> list[int]:
        assert self.control is not None and self.lifeline is not None
        cell_fd, *memory = self.memory
        tokens = [theirs.fileno() for _, theirs in self.tokens]
        return [cell_fd, self.control[1].fileno(), self.lifeline[1].fileno(), *tokens, *memory]

    def disconnect(self) -> None:
        """Close its channels, as far as they are still here."""
        for sock in (*(self.control or ()), *(self.lifeline or ()), *itertools.chain.from_iterable(self.tokens)):
            sock.close()
        self.control = self.lifeline = None
        self.tokens = []

    def close(self) -> None:
        self.disconnect()
        for fd in self.memory:
            os.close(fd)


@dataclass
class _Process:
    """A worker that exists."""

    start: StartWorker
    encoded: Raw
    pid: int
    memory: list[int]
    lifeline: Channel
    dropped: set[MemoryName]  # of its memory: not kept at its exit
    held: Held  # device descriptors that must outlast it
    rehearsed: Held | None = None  # those of the spare that it was, until it has sent its own
    tokens: dict[int, int] = field(default_factory=dict)  # by gateway: its end of that channel, until it has it

    def read(self, record: Callable[[], None]) -> None:
        """Read the device descriptors that it has sent."""
        self.held.read()
        if self.rehearsed is not None:
            self.rehearsed.read()
        if self.rehearsed is not None and self.held.is_complete:
            rehearsed, self.rehearsed = self.rehearsed, None
            record()
            rehearsed.let_go()


@dataclass
class Workers:
    """Every worker process of this machine that exists or is being forked."""

    to_zygote: Send
    to_orchestrator: Send
    to_gateway: Callable[[int, AnyMessage, Sequence[int]], bool]  # whether it has the message, or there is no gateway
    record: Callable[[], None]  # write the process table
    unannounced: Callable[[], list[int]]  # processes of the instance that the supervisor does not know
    num_gateways: int = 1
    _processes: dict[WorkerId, _Process] = field(default_factory=dict)
    _orders: dict[WorkerId, _Order] = field(default_factory=dict)
    _kept: dict[MemoryName, int] = field(default_factory=dict)  # memory of exited workers that no live worker has
    _latest: dict[Rank, tuple[Incarnation, tuple[Role, ...]]] = field(default_factory=dict)
    _early_exits: dict[int, int] = field(default_factory=dict)  # statuses by pid, of processes not announced yet
    _spares: dict[int, Held] = field(default_factory=dict)  # by pid, until they end or become workers
    _deferred: DeferredClose = field(default_factory=DeferredClose)
    _retry: Retry = field(default_factory=lambda: Retry(log))

    # -- starts ----------------------------------------------------------------------------------

    def provision(self, message: Provision, memory: list[int]) -> None:
        """Make the channels and ask the zygote to fork. Takes ownership of the descriptors."""
        start = message.start
        self._latest[start.rank] = start.incarnation, start.roles
        self._orders[WorkerId(start.rank, start.incarnation)] = _Order(start, encode(start), memory, set())
        self._ask()

    def ask_again(self) -> None:
        """There is a new zygote. Kill processes that the old one forked and did not announce, and repeat the pending
        forks with new channels."""
        for pid in self.unannounced():
            os.kill(pid, signal.SIGKILL)
        for order in self._orders.values():
            order.disconnect()
        self._ask()

    def forked(self, message: WorkerForked) -> None:
        """The process exists: send its channels to the orchestrator and the gateway."""
        seat = WorkerId(message.rank, message.incarnation)
        order = self._orders.pop(seat)
        assert order.control is not None and order.lifeline is not None, "the zygote was asked"
        lifeline = Channel(order.lifeline[0], waits_for_room=True)
        order.lifeline[1].close()
        worker = _Process(
            order.start,
            order.encoded,
            message.pid,
            order.memory,
            lifeline,
            order.dropped,
            held=Held(f"worker {message.rank}", lifeline, record=self.record),
            rehearsed=self._spares.pop(message.pid, None),
            tokens={number: ours.detach() for number, (ours, _) in enumerate(order.tokens)},
        )
        self._processes[seat] = worker
        self._introduce(worker, order.control[0])
        order.lifeline = None
        order.disconnect()
        self._close(self._kept.pop(memory) for memory in worker.start.memory if self._has_twice(memory, worker))
        self._attach(worker)
        if message.pid in self._early_exits:
            self.exited(message.pid, self._early_exits.pop(message.pid))
        if not self._orders:
            self._early_exits.clear()

    def _has_twice(self, memory: MemoryName, worker: _Process) -> bool:
        """Whether it is kept here, and this worker has it."""
        return memory in self._kept and memory not in worker.dropped

    def _attach(self, worker: _Process) -> None:
        """Give each gateway its end of its tokens channel, once. The worker stands in the table; what a gateway gets
        twice, because a supervisor died in between, is the same socket."""
        if not worker.tokens:
            return
        attach = Attach(rank=worker.start.rank, incarnation=worker.start.incarnation)
        for number, tokens in list(worker.tokens.items()):
            if self.to_gateway(number, attach, [tokens]):
                del worker.tokens[number]
                self._close([tokens])

    def spare_forked(self, pid: int, lifeline: Channel) -> None:
        """The zygote has forked a spare, which now warms up on its device."""
        self._spares[pid] = Held(f"spare {pid}", lifeline, is_for_this=True, record=self.record)

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
        with ExitStack() as made:
            pairs: list[tuple[socket.socket, socket.socket]] = []
            for _ in self._processes:
                ours, theirs = Channel.pair()
                pairs.append((made.enter_context(ours), made.enter_context(theirs)))
            for worker, (ours, theirs) in zip(self._processes.values(), pairs, strict=True):
                worker.lifeline.give(OrchestratorAttached(), [theirs.detach()])
                self._introduce(worker, ours)
        for memory, fd in self._kept.items():
            self.to_orchestrator(Offer(memory=memory), fds=[fd])

    def _introduce(self, worker: _Process, control: socket.socket) -> None:
        started = WorkerStarted(start=worker.start, pid=worker.pid, dropped=tuple(worker.dropped))
        self.to_orchestrator(started, fds=[control.fileno(), *worker.memory])

    def attach_gateway(self, number: int) -> None:
        """Connect a new gateway of this number with every attention worker; all, or none."""
        homes = [worker for worker in self._processes.values() if Role.ATTENTION in worker.start.roles]
        with ExitStack() as made:
            pairs = [tuple(map(made.enter_context, Channel.pair(_TOKENS_BUFFER_BYTES))) for _ in homes]
            for worker, (ours, theirs) in zip(homes, pairs, strict=True):
                if (old := worker.tokens.pop(number, None)) is not None:  # for the gateway before
                    self._close([old])
                worker.lifeline.give(TokensAttached(gateway=number), [theirs.detach()])
                worker.tokens[number] = ours.detach()
                self._attach(worker)

    def flush(self) -> None:
        """Call this regularly: writes and reads lifelines, closes what is due, asks for what could not be asked for."""
        self._retry.tend(time.monotonic())
        self._ask()
        for worker in self._processes.values():
            worker.lifeline.flush()
            worker.read(self.record)
            self._attach(worker)
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
                left = [cell_fd, *worker.tokens.values()]
                for memory, fd in zip(worker.start.memory, fds, strict=True):
                    if memory in worker.dropped or self._lives_on(memory):
                        left.append(fd)
                    else:
                        self._kept[memory] = fd
                self._close(left)
                self._part(worker)
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

    def drop(self, memory: MemoryName) -> None:
        """This memory is not needed any more. Workers that have it may not have ended yet, or not have begun."""
        holders: list[_Order | _Process] = [*self._orders.values(), *self._processes.values()]
        for holder in holders:
            if memory in holder.start.memory:
                holder.dropped.add(memory)
        if memory in self._kept:
            self._close([self._kept.pop(memory)])

    def _lives_on(self, memory: MemoryName) -> bool:
        """Whether a live worker has it, and would hand it over to a new orchestrator."""
        workers = self._processes.values()
        return any(memory in worker.start.memory and memory not in worker.dropped for worker in workers)

    def _close(self, fds: Iterable[int]) -> None:
        """What stood in the process table, and does not now: its number may be another file's the next moment."""
        fds = list(fds)
        self.record()
        _close(fds)

    def signal(self, message: SignalWorker) -> None:
        """Signal exactly this incarnation: its pid cannot be reused before the supervisor reaps it."""
        worker = self._processes.get(WorkerId(message.rank, message.incarnation))
        if worker is not None:
            os.kill(worker.pid, message.signal)
        if message.id is not None:
            reason = "" if worker is not None else f"worker {message.rank} has no process at the moment"
            pid = worker.pid if worker is not None else None
            self.to_orchestrator(Signalled(id=message.id, pid=pid, reason=reason))

    def close(self) -> None:
        """All processes have ended. Close everything."""
        workers, orders, kept = list(self._processes.values()), list(self._orders.values()), list(self._kept.values())
        self._processes.clear()
        self._orders.clear()
        self._kept.clear()
        self._close(kept)
        for worker in workers:
            _close([*worker.memory, *worker.tokens.values()])
            self._part(worker)
        for order in orders:
            order.close()
        for held in self._spares.values():
            held.let_go()
        self._spares.clear()
        self._deferred.close()

    # -- the process table -----------------------------------------------------------------------

    def table(self) -> WorkersTable:
        """All that the next supervisor needs. Not the spares: they end with the zygote."""
        return WorkersTable(
            workers=[
                WorkerRow(
                    start=worker.encoded,
                    pid=worker.pid,
                    memory=worker.memory,
                    dropped=sorted(worker.dropped, key=repr),
                    held=worker.held.row(),
                    rehearsed=worker.rehearsed.row() if worker.rehearsed is not None else None,
                    tokens=worker.tokens,
                )
                for worker in self._processes.values()
            ],
            orders=[
                OrderRow(start=order.encoded, memory=order.memory, dropped=sorted(order.dropped, key=repr))
                for order in self._orders.values()
            ],
            kept=list(self._kept.items()),
            latest=self._latest,
        )

    def restore(self, table: WorkersTable) -> None:
        """Goes on as the supervisor before has left it. A new zygote will be asked for all that was not forked."""
        for row in table.workers:
            start = start_of(row.start)
            owner = f"worker {start.rank}"
            held = Held.of_row(row.held, owner, self.record)
            rehearsed = Held.of_row(row.rehearsed, owner, self.record) if row.rehearsed is not None else None
            assert held.lifeline is not None, "a worker has one"
            self._processes[WorkerId(start.rank, start.incarnation)] = _Process(
                start, row.start, row.pid, row.memory, held.lifeline, set(row.dropped), held, rehearsed, row.tokens
            )
        for order in table.orders:
            start = start_of(order.start)
            self._orders[WorkerId(start.rank, start.incarnation)] = _Order(
                start, order.start, order.memory, set(order.dropped)
            )
        self._kept, self._latest = dict(table.kept), table.latest

    def _ask(self) -> None:
        """Ask the zygote for all that it was not asked for yet."""
        for order in self._orders.values():
            if order.is_asked or not self._retry.is_due(time.monotonic()):
                continue
            try:
                order.connect(self.num_gateways)
            except OSError as error:
                self._retry.fail(f"connect worker {order.start.rank}", error, time.monotonic())
                return
            self.to_zygote(ForkWorker(start=order.start), fds=order.worker_fds)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
