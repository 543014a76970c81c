"""How a worker is started: the anchor allocates its memory, the supervisor starts its process, its channel comes here.

    provision -> one piece of memory after the other -> Provision to the supervisor ... WorkerStarted -> take_in

While an orchestrator recovers, existing workers and memory are taken in the same way.
"""

import os
from collections.abc import Callable

from everserve.control.decide.inputs import AnyInput, Said
from everserve.control.hold.catalog import Catalog
from everserve.control.hold.hosts import Hosts
from everserve.control.hold.log_references import Logs
from everserve.control.hold.needs import Needs
from everserve.control.hold.worker_ends import WorkerEnd, WorkerEnds
from everserve.memory.anchor_client import AnchorClient
from everserve.memory.liveness import ORCHESTRATOR_WORD, Cell
from everserve.memory.names import lack
from everserve.tables.goal import Goal
from everserve.tables.ids import WorkerId
from everserve.tables.memory import Kind, MemoryName
from everserve.wire.channel import Channel
from everserve.wire.messages import Failed, Provision, StartWorker, WorkerStarted

_OF_LOG = (Kind.KV, Kind.LOG)


class Provisioning:
    """All from the decision to fill a seat until the orchestrator has the channel of the new process."""

    def __init__(
        self,
        needs: Needs,
        anchor: AnchorClient,
        catalog: Catalog,
        ends: WorkerEnds,
        logs: Logs,
        hosts: Hosts,
        tell: Callable[[AnyInput], None],
    ) -> None:
        self._needs = needs
        self._anchor = anchor
        self._catalog = catalog
        self._ends = ends
        self._logs = logs
        self._hosts = hosts
        self._tell = tell
        self._coming: dict[WorkerId, Goal] = {}  # workers whose memory is being allocated, and their goal

    def provision(self, worker: WorkerId, goal: Goal) -> StartWorker:
        """Request its memory; when the last piece is allocated, the worker is started."""
        self._coming[worker] = goal
        self._go_on(worker)
        return self._needs.start(goal, worker)

    def call_off(self, worker: WorkerId) -> None:
        """The worker is lost while its memory is still being allocated or its process is being forked."""
        goal = self._coming.pop(worker, None)
        for memory in self._needs.memory(goal, worker) if goal is not None else ():
            if worker in memory.owners:
                self._anchor.release(memory)

    def take_in(self, message: WorkerStarted, fds: list[int], is_lost: bool) -> WorkerEnd:
        """A process exists. Takes ownership of the descriptors that came with the message."""
        control_fd, cell_fd, *memory_fds = fds
        start, channel = message.start, Channel.of_fd(control_fd)
        worker = WorkerId(start.rank, start.incarnation)
        self._coming.pop(worker, None)
        cell_fd = self._anchor.hold(self._needs.cell(worker, start.host), cell_fd)
        end = WorkerEnd(start.rank, start.incarnation, start.roles, message.pid, cell_fd, Cell(cell_fd), channel)
        end.host, end.is_lost = start.host, is_lost
        self._ends.add(end)
        for memory, fd in zip(start.memory, memory_fds, strict=True):
            if memory not in message.dropped and self._is_current(end, memory):
                self._hold(memory, fd)
            else:
                os.close(fd)
        if end.is_lost:  # before its process existed: it never had a stream that could need its log
            self._logs.lose(worker)
            self._logs.settle_all(worker)
        return end

    def _is_current(self, end: WorkerEnd, memory: MemoryName) -> bool:
        """The device of a worker that is being forked may have been lost meanwhile, and its seat's memory with it. And
        a new orchestrator may find workers with different generations of memory: the latest counts. (Whether they are
        the same cannot be asked: descriptors of device memory are all of one file.)"""
        if end.is_lost and memory.generation:
            return False
        held = self._anchor.find(memory.need)
        if held is not None and held.generation < memory.generation:
            self._catalog.let_go(held)
        return held is None or held.generation <= memory.generation

    def take_in_memory(self, memory: MemoryName, fd: int) -> None:
        """Memory of a worker that had exited before this orchestrator started."""
        self._hold(memory, fd)
        if memory.kind is Kind.LOG:
            self._logs.lose(memory.owners[0])

    def _hold(self, memory: MemoryName, fd: int) -> None:
        """A worker that exists has it, or had it."""
        self._anchor.hold(memory, fd)
        if memory.kind is Kind.LOG:
            self._logs.add(memory)
        elif memory.kind is not Kind.KV:  # which is offered with its log
            self._catalog.offer(memory)

    def _go_on(self, worker: WorkerId) -> None:
        goal = self._coming.get(worker)
        if goal is None:
            return  # it was called off while its memory was being allocated
        needs = self._needs.memory(goal, worker)
        memory = [piece for need in needs if (piece := self._anchor.find(need)) is not None]
        if len(memory) == len(needs):
            fds = [self._anchor.memory.descriptor(piece) for piece in memory]
            start = self._needs.start(goal, worker, memory[1:])
            self._hosts.send(start.host, Provision(start=start), fds=fds)
            return
        missing = next(need for need in needs if self._anchor.find(need) is None)
        if not self._inherit_log(worker, needs, missing):
            self._ask_for(worker, self._anchor.requested(missing) or missing.made_for(worker))

    def _ask_for(self, worker: WorkerId, memory: MemoryName) -> None:
        def go_on(fd: int) -> None:
            self._anchor.hold(memory, os.dup(fd))
            self._go_on(worker)

        def fail(reason: str) -> None:
            why = lack(worker.rank, memory.kind, reason)  # reported as if the worker had failed to allocate it
            self._tell(Said(worker.rank, worker.incarnation, Failed(reason=why, user_error=True)))

        self._anchor.allocate(memory, then=go_on, otherwise=fail)

    def _inherit_log(self, worker: WorkerId, memory: tuple[MemoryName, ...], missing: MemoryName) -> bool:
        """With `--kv-log anchor`, and where KV is with heads, a worker adopts its predecessor's KV in place, if no
        process can write to it any more: both the log and its blocks, or neither."""
        of_log = [piece for piece in memory if piece.kind in _OF_LOG]
        before = self._logs.last_of(worker.rank)
        if not self._needs.logs_are_inherited or before is None or missing not in of_log[:1]:
            return False
        end = self._ends.get(before)
        if end is not None and not end.cell.is_dead(ORCHESTRATOR_WORD):
            return False
        for piece, fd in zip(of_log, self._logs.descriptors(before), strict=True):
            self._anchor.hold(piece, os.dup(fd))
        self._go_on(worker)
        return True
