"""How a worker is started: the anchor allocates its memory, the supervisor starts its process, its channel comes here.

    provision -> one piece of memory after the other -> Provision to the supervisor ... WorkerStarted -> take_in

While an orchestrator recovers, existing workers and memory are taken in the same way.
"""

import os
from collections.abc import Callable

from everserve.control import events
from everserve.control.anchor_client import AnchorClient
from everserve.control.kv_sources import KvSources
from everserve.control.log_references import Logs
from everserve.control.needs import Needs
from everserve.control.weights_sources import WeightsSources
from everserve.control.worker_ends import WorkerEnd, WorkerEnds
from everserve.memory.liveness import ORCHESTRATOR_WORD, Cell
from everserve.memory.names import lack
from everserve.tables.goal import Goal
from everserve.tables.ids import WorkerId
from everserve.tables.memory import Kind, Memory, seat_owner
from everserve.wire.channel import Channel
from everserve.wire.messages import Provision, StartWorker, WorkerStarted

_OF_LOG = (Kind.KV, Kind.LOG)


class Provisioning:
    """From the decision to fill a seat until the orchestrator has the channel of the new process."""

    def __init__(
        self,
        needs: Needs,
        anchor: AnchorClient,
        ends: WorkerEnds,
        logs: Logs,
        weights: WeightsSources,
        kv: KvSources,
        supervisor: Channel,
        tell: Callable[[events.AnyEvent], None],
    ) -> None:
        self._needs = needs
        self._anchor = anchor
        self._ends = ends
        self._logs = logs
        self._weights = weights
        self._kv = kv
        self._supervisor = supervisor
        self._tell = tell
        self._coming: dict[WorkerId, Goal] = {}  # workers whose memory is being allocated, and their goal
        self._newest: dict[Memory, int] = {}  # of a seat: the latest incarnation that has it, or will have

    def provision(self, worker: WorkerId, goal: Goal) -> StartWorker:
        """Request its memory; when the last piece is allocated, the worker is started."""
        self._coming[worker] = goal
        of_seat = (piece for piece in self._needs.memory(goal, worker) if piece.owners == (seat_owner(worker.rank),))
        self._newest |= dict.fromkeys(of_seat, worker.incarnation)
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
        cell_fd = self._anchor.hold(self._needs.cell(worker), cell_fd)
        end = WorkerEnd(start.rank, start.incarnation, start.roles, message.pid, cell_fd, Cell(cell_fd), channel)
        end.is_lost = is_lost
        self._ends.add(end)
        for memory, fd in zip(start.memory, memory_fds, strict=True):
            if memory not in message.dropped and self._is_current(end, memory):
                self._hold(memory, fd)
            else:
                os.close(fd)
        if end.is_lost:  # before its process existed: it never had a stream that could need its log
            self._logs.lose(worker)
            self._logs.settle(worker)
        return end

    def _is_current(self, end: WorkerEnd, memory: Memory) -> bool:
        """A device may be lost while a worker on it is being forked: what that worker has is lost then, and the next
        incarnation gets other memory, by the same name. A new orchestrator may find both processes: the memory of the
        later one counts, and what was held before does not. (Whether it is the same cannot be asked: descriptors of
        device memory are all of one file.)"""
        if memory.owners != (seat_owner(end.rank),):
            return True
        newest = self._newest.get(memory, 0)
        if end.is_lost or end.incarnation < newest:
            return False
        self._newest[memory] = end.incarnation
        if end.incarnation > newest and self._anchor.held(memory) is not None:
            self._anchor.release(memory)
        return True

    def take_in_memory(self, memory: Memory, fd: int) -> None:
        """Memory of a worker that had exited before this orchestrator started."""
        self._hold(memory, fd)
        if memory.kind is Kind.LOG:
            self._logs.lose(memory.owners[0])

    def _hold(self, memory: Memory, fd: int) -> None:
        if memory.kind in _OF_LOG:
            self._logs.add(memory, fd)
        else:
            self._anchor.hold(memory, fd)
            self._note(memory)

    def _note(self, memory: Memory) -> None:
        self._weights.note(memory)
        self._kv.note(memory)

    def _go_on(self, worker: WorkerId) -> None:
        goal = self._coming.get(worker)
        if goal is None:
            return  # it was called off while its memory was being allocated
        memory = self._needs.memory(goal, worker)
        missing = next((piece for piece in memory if self._anchor.held(piece) is None), None)
        if missing is None:
            fds = [fd for piece in memory if (fd := self._anchor.held(piece)) is not None]
            self._supervisor.send(Provision(start=self._needs.start(goal, worker)), fds=fds)
        elif not self._inherit_log(worker, memory, missing):
            self._ask_for(worker, missing)

    def _ask_for(self, worker: WorkerId, memory: Memory) -> None:
        def go_on(fd: int) -> None:
            self._anchor.hold(memory, os.dup(fd))
            self._note(memory)
            self._go_on(worker)

        def fail(reason: str) -> None:
            why = lack(worker.rank, memory.kind, reason)  # reported as if the worker had failed to allocate it
            self._tell(events.SaidFailed(worker.rank, worker.incarnation, why, user_error=True))

        self._anchor.allocate(memory, then=go_on, otherwise=fail)

    def _inherit_log(self, worker: WorkerId, memory: tuple[Memory, ...], missing: Memory) -> bool:
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
