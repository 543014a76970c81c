"""A joined host, as the carrier of the first one has it.

For each worker there: a *proxy cell* in memory of this host, which is advanced as beats say and marked when the worker
has died; a socket pair whose other end is the orchestrator's; and one for each gateway, if the worker has streams.
"""

import os
import selectors
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from everserve.carrier import notes
from everserve.carrier.frames import (
    AnyContent,
    AttachGateway,
    Beat,
    Bytes,
    Closed,
    Died,
    HandOver,
    Opened,
    Pulse,
    Said,
    SameMemory,
    Told,
)
from everserve.carrier.session import Session
from everserve.carrier.sockets import Pipe
from everserve.errors import ProtocolError
from everserve.memory.liveness import CELL_BYTES, Cell
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.tables.members import HOST_IS_SILENT
from everserve.tables.memory import Kind, MemoryName
from everserve.wire import messages
from everserve.wire.channel import Channel, ChannelClosed
from everserve.wire.messages import (
    Allocate,
    AnyMessage,
    Attach,
    EventHappened,
    FoundProcess,
    HostProcesses,
    LeftMemory,
    Offer,
    Provision,
    Release,
    Signalled,
    SignalWorker,
    StartWorker,
    Withdraw,
    WorkerExited,
    WorkerStarted,
)

_TOKENS_BUFFER_BYTES = 4 << 20  # as procs/provisioner.py

Give = Callable[[AnyMessage, list[int]], None]  # the descriptors are the receiver's


@dataclass(eq=False)
class _Worker:
    """A worker of that host."""

    start: StartWorker
    pid: int
    dropped: tuple[MemoryName, ...]
    cell_fd: int
    cell: Cell
    line: int | None = None  # to it, as the orchestrator
    channel: Channel | None = None  # to the orchestrator: what it says to the worker comes here ...
    pipe: Pipe | None = None  # ... and what the worker says goes there
    early: list[bytes] = field(default_factory=list)  # what it was told before there was a line


class RemoteHost:
    """One boot of it."""

    def __init__(
        self,
        number: int,
        boot: str,
        session: Session,
        selector: selectors.BaseSelector,
        to_orchestrator: Give,
        to_supervisor: Give,
    ) -> None:
        self.number = number
        self.boot = boot
        self.session = session
        self._selector = selector
        self._to_orchestrator = to_orchestrator
        self._to_supervisor = to_supervisor
        self._cells: dict[WorkerId, int] = {}  # proxies, from their allocation on
        self._orders: dict[WorkerId, StartWorker] = {}  # workers that do not exist yet
        self._latest: dict[Rank, FoundProcess] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._lines: dict[int, tuple[WorkerId, int | None]] = {}
        self._pipes: dict[int, Pipe] = {}  # to gateways, by line
        self._is_silent = False

    # -- from the other host ---------------------------------------------------------------------

    def handle(self, content: AnyContent | Beat) -> None:
        """Raises ProtocolError for what the other end does not send."""
        match content:
            case Beat():
                self._note_pulses(content.pulses)
            case Bytes():
                self._write(content.line, content.data)
            case Opened():
                self._open(content)
            case Closed():
                self._close_line(content.line)
            case Died():
                if (worker := self._workers.get(WorkerId(content.rank, content.incarnation))) is not None:
                    worker.cell.mark_dead()
            case Said():
                self._on_said(messages.decode(content.message))
            case _:
                raise ProtocolError(f"a joined host does not send {type(content).__name__}")

    def _on_said(self, message: AnyMessage) -> None:
        match message:
            case Offer():
                self._to_orchestrator(message, [self._stand_in(message.memory)])
            case LeftMemory():
                self._to_orchestrator(message, [notes.write(message.memory)])
            case Withdraw() | Signalled():
                self._to_orchestrator(message, [])
            case WorkerStarted():
                self._on_started(message)
            case WorkerExited():
                self._on_exited(message)
            case EventHappened():
                self._to_supervisor(message, [])
            case HostProcesses():
                self._to_supervisor(HostProcesses(host=self.number, processes=message.processes), [])
            case _:
                raise ProtocolError(f"a joined host does not say {type(message).__name__}")

    def _stand_in(self, memory: MemoryName) -> int:
        """What the orchestrator gets for that memory. The descriptor is the caller's."""
        if memory.kind is not Kind.CELL:
            return notes.write(memory)
        (worker,) = memory.owners
        return os.dup(self._cell_of(worker))

    def _cell_of(self, worker: WorkerId) -> int:
        if worker not in self._cells:
            fd = os.memfd_create(f"everserve-proxy-{worker.rank}.{worker.incarnation}")
            os.ftruncate(fd, CELL_BYTES)
            self._cells[worker] = fd
        return self._cells[worker]

    def _on_started(self, message: WorkerStarted) -> None:
        """A new process; or, when workers were handed over, an existing one, which the orchestrator has."""
        id = WorkerId(message.start.rank, message.start.incarnation)
        self._orders.pop(id, None)
        if id in self._workers:
            self._workers[id].dropped = message.dropped
            return
        cell_fd = self._cell_of(id)
        worker = _Worker(message.start, message.pid, message.dropped, cell_fd, Cell(cell_fd))
        self._workers[id] = worker
        self._introduce(worker)

    def _introduce(self, worker: _Worker) -> None:
        """Give the orchestrator a channel to it."""
        ours, theirs = Channel.pair()
        worker.channel = Channel(ours)
        worker.pipe = Pipe(ours.dup())
        self._selector.register(ours, selectors.EVENT_READ, partial(self._read_control, worker))
        memory = [notes.write(name) for name in worker.start.memory]
        started = WorkerStarted(start=worker.start, pid=worker.pid, dropped=worker.dropped)
        self._to_orchestrator(started, [theirs.detach(), os.dup(worker.cell_fd), *memory])

    def _on_exited(self, message: WorkerExited) -> None:
        id = WorkerId(message.rank, message.incarnation)
        order, worker = self._orders.pop(id, None), self._workers.pop(id, None)
        if worker is not None:
            self._latest[id.rank] = _found(worker.start, -1)
            self._forget(id, worker)
        elif order is not None:
            self._latest[id.rank] = _found(order, -1)
        self._to_orchestrator(message, [])

    def _forget(self, id: WorkerId, worker: _Worker) -> None:
        self._drop_control(worker)
        worker.cell.close()
        os.close(self._cells.pop(id))

    # -- silence ---------------------------------------------------------------------------------

    def _note_pulses(self, pulses: Iterable[Pulse]) -> None:
        self._is_silent = False
        for pulse in pulses:
            worker = self._workers.get(WorkerId(pulse.rank, pulse.incarnation))
            if worker is not None:
                worker.cell.copy_pulse(pulse.pulse, pulse.lease_is_over, pulse.letter)

    def fall_silent(self) -> None:
        """Nothing is heard of the host: its workers are in doubt, and the host is judged as a whole."""
        if not self._is_silent:
            self._is_silent = True
            for worker in self._workers.values():
                worker.cell.say_letter(HOST_IS_SILENT)

    # -- lines -----------------------------------------------------------------------------------

    def _open(self, opened: Opened) -> None:
        id = WorkerId(opened.rank, opened.incarnation)
        self._lines[opened.line] = id, opened.gateway
        worker = self._workers.get(id)
        if worker is None:
            raise ProtocolError(f"a line to worker {id.rank}.{id.incarnation}, which was not announced")
        if opened.gateway is None:
            worker.line = opened.line
            early, worker.early = worker.early, []
            for message in early:
                self.session.send(Told(line=opened.line, message=message))
            return
        ours, theirs = Channel.pair(_TOKENS_BUFFER_BYTES)
        self._pipes[opened.line] = pipe = Pipe(ours)
        self._selector.register(pipe, selectors.EVENT_READ, partial(self._read_tokens, opened.line))
        attach = Attach(rank=id.rank, incarnation=id.incarnation, gateway=opened.gateway)
        self._to_supervisor(attach, [theirs.detach()])

    def _write(self, line: int, data: bytes) -> None:
        if (pipe := self._pipes.get(line)) is not None:
            pipe.write(data)
            return
        id, _ = self._lines.get(line, (None, None))
        worker = self._workers.get(id) if id is not None else None
        if worker is not None and worker.pipe is not None:
            worker.pipe.write(data)

    def _close_line(self, line: int) -> None:
        id, gateway = self._lines.pop(line, (None, None))
        if (pipe := self._pipes.pop(line, None)) is not None:
            self._selector.unregister(pipe)
            pipe.close()
        worker = self._workers.get(id) if id is not None else None
        if worker is not None and gateway is None and worker.line == line:
            worker.line = None
            self._drop_control(worker)

    def _read_tokens(self, line: int) -> None:
        """What a gateway says to a worker."""
        pipe = self._pipes.get(line)
        if pipe is None or self.session.is_behind:
            return
        while data := pipe.read():
            self.session.send(Bytes(line=line, data=data))
        if pipe.has_ended:
            self.session.send(Closed(line=line))
            self._close_line(line)

    def _read_control(self, worker: _Worker) -> None:
        """What the orchestrator says to a worker: without descriptors."""
        if worker.channel is None:
            return
        try:
            for message in worker.channel.receive_all():
                packed = messages.encode(message)
                if worker.line is None:
                    worker.early.append(packed)
                else:
                    self.session.send(Told(line=worker.line, message=packed))
        except ChannelClosed:  # it has died, or has forgotten this worker
            self._drop_control(worker)

    def _drop_control(self, worker: _Worker) -> None:
        if worker.channel is not None and worker.pipe is not None:
            self._selector.unregister(worker.channel.sock)
            worker.pipe.close()
            worker.channel.close()
            worker.channel = worker.pipe = None

    def flush(self) -> None:
        for pipe in self._pipes.values():
            pipe.flush()
        for worker in self._workers.values():
            if worker.pipe is not None:
                worker.pipe.flush()

    @property
    def wants_write(self) -> bool:
        return any(pipe.wants_write for pipe in self._pipes.values())

    # -- from the first host ---------------------------------------------------------------------

    def tell(self, message: AnyMessage, fds: Sequence[int]) -> None:
        """What the orchestrator says to supervisor and anchor there. The descriptors stay the caller's."""
        match message:
            case Provision():
                start = message.start
                self._orders[WorkerId(start.rank, start.incarnation)] = start
                self._send(message)
            case Offer():
                if message.memory.kind is not Kind.CELL and (named := notes.read(fds[0])) != message.memory:
                    self.session.send(SameMemory(name=message.memory, is_that_of=named))
            case Allocate() | Release() | SignalWorker():
                self._send(message)
            case _:
                raise AssertionError(f"the orchestrator does not send {type(message).__name__} to other hosts")

    def _send(self, message: AnyMessage) -> None:
        self.session.send(Said(message=messages.encode(message)))

    def found(self) -> tuple[FoundProcess, ...]:
        """Its workers, for a new orchestrator."""
        found = {WorkerId(one.rank, one.incarnation): one for one in self._latest.values()}
        found |= {id: _found(start, 0) for id, start in self._orders.items()}
        found |= {id: _found(worker.start, worker.pid) for id, worker in self._workers.items()}
        return tuple(found.values())

    def hand_over(self) -> None:
        """To a new orchestrator: a channel to each worker, which reports there."""
        for worker in self._workers.values():
            self._drop_control(worker)
            if worker.line is not None:
                self._lines.pop(worker.line, None)
            worker.line, worker.early = None, []
            self._introduce(worker)
        self.session.send(HandOver())

    def attach_gateway(self, number: int) -> None:
        """There is another gateway of this number."""
        for line, (_, gateway) in list(self._lines.items()):
            if gateway == number:
                self.session.send(Closed(line=line))
                self._close_line(line)
        self.session.send(AttachGateway(gateway=number))

    def has(self, rank: Rank, incarnation: Incarnation) -> bool:
        return WorkerId(rank, incarnation) in self._workers

    def lose(self) -> None:
        """It is lost: its workers are, for all that have a channel to one."""
        for line in list(self._lines):
            self._close_line(line)
        for id, worker in list(self._workers.items()):
            del self._workers[id]
            self._forget(id, worker)
            self._to_orchestrator(WorkerExited(rank=id.rank, incarnation=id.incarnation, exit_status=-9), [])
        for id in self._orders:
            self._to_orchestrator(WorkerExited(rank=id.rank, incarnation=id.incarnation, exit_status=-9), [])
        self._orders.clear()
        for fd in self._cells.values():
            os.close(fd)
        self._cells.clear()
        self.session.detach()


def _found(start: StartWorker, pid: int) -> FoundProcess:
    return FoundProcess(rank=start.rank, incarnation=Incarnation(start.incarnation), pid=pid, roles=start.roles)
