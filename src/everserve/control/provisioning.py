"""How a worker comes to be: its memory is asked for, the supervisor starts it, and its end is here.

    provision -> one piece of memory after the other -> Provision to the supervisor ... WorkerStarted -> take_in

While we recover, workers and memory that exist are taken in the same way.
"""

import os

from everserve.control import events
from everserve.control.anchor_client import Memory
from everserve.control.design import Design, NeededMemory
from everserve.control.event_queue import Deciding
from everserve.control.log_references import Logs
from everserve.control.worker_ends import WorkerEnd, WorkerEnds
from everserve.memory.liveness import ORCHESTRATOR_WORD, Cell
from everserve.memory.names import cell_name, kind_of, kv_name, lack, log_name, log_of
from everserve.tables.ids import Rank, WorkerId
from everserve.wire.channel import Channel
from everserve.wire.events import EventLog, WorkerProvisioned
from everserve.wire.messages import Provision, StartWorker, WorkerStarted


class Births:
    """From the decision that a seat gets a process to the end of that process here."""

    def __init__(
        self,
        design: Design,
        detect_ms: float,
        memory: Memory,
        ends: WorkerEnds,
        logs: Logs,
        deciding: Deciding,
        supervisor: Channel,
        event_log: EventLog,
    ) -> None:
        self._design = design
        self._detect_ms = detect_ms
        self._memory = memory
        self._ends = ends
        self._logs = logs
        self._deciding = deciding
        self._supervisor = supervisor
        self._event_log = event_log

    def provision(self, seat: WorkerId) -> None:
        """One piece of memory after the other is asked for; when the last one is there, the worker is started."""
        if self._deciding.is_lost(seat):
            return  # it was given up while its memory was being allocated
        for needed in self._design.memory_of(seat):
            if self._memory.held(needed.name) is None:
                self._ask_for(seat, needed)
                return
        self._start(seat)

    def call_off(self, seat: WorkerId) -> None:
        """It is lost while its memory is still being allocated, or its process is just being born."""
        for name in (cell_name(seat), kv_name(seat), log_name(seat)):
            self._memory.release(name)

    def take_in(self, message: WorkerStarted, fds: list[int]) -> WorkerEnd:
        """A process exists; its descriptors have come with the message, and are ours from now on."""
        control_fd, cell_fd, *memory = fds
        start, channel = message.start, Channel.of_fd(control_fd)
        seat = WorkerId(start.rank, start.incarnation)
        cell_fd = self._memory.hold(cell_name(seat), cell_fd)
        end = WorkerEnd(start.rank, start.incarnation, start.roles, message.pid, cell_fd, Cell(cell_fd), channel)
        end.is_lost = self._deciding.is_lost(seat)
        self._ends.add(end)
        for name, fd in zip(start.memory, memory, strict=True):
            if (log_id := log_of(name)) is not None:
                self._logs.add(log_id, fd)
            else:
                self._memory.hold(name, fd)
        if end.is_lost:
            self._logs.lose(seat)
        return end

    def take_in_memory(self, name: str, fd: int) -> None:
        """Memory of a worker that had exited before we came."""
        if (log_id := log_of(name)) is None:
            self._memory.hold(name, fd)
        else:
            self._logs.add(log_id, fd)
            self._logs.lose(log_id)

    def _ask_for(self, seat: WorkerId, needed: NeededMemory) -> None:
        def go_on(fd: int) -> None:
            self._memory.hold(needed.name, os.dup(fd))
            self.provision(seat)

        def fail(reason: str) -> None:
            why = lack(seat[0], kind_of(needed.name), reason)
            self._deciding.tell(events.SaidFailed(*seat, why, user_error=True))  # as if it had found out itself

        of_log = [each.name for each in self._design.memory_of(seat) if each.name in (kv_name(seat), log_name(seat))]
        if needed.name in of_log[:1] and (inherited := self._inherited_log(seat[0])):
            for name, fd in zip(of_log, inherited, strict=True):  # all of it, or nothing
                self._memory.hold(name, os.dup(fd))
            self.provision(seat)
            return
        self._memory.allocate(needed.name, needed.num_bytes, then=go_on, otherwise=fail, device=needed.device)

    def _inherited_log(self, rank: Rank) -> tuple[int, ...]:
        """With `--kv-log anchor` the predecessor's KV is adopted where it lies, if nobody can write to it any more."""
        log_id = self._logs.last_of(rank)
        if self._design.settings.log.mode != "anchor" or log_id is None:
            return ()
        end = self._ends.get(*log_id)
        is_dead = end is None or end.cell.is_dead(ORCHESTRATOR_WORD)
        return self._logs.descriptors(log_id) if is_dead else ()

    def _start(self, seat: WorkerId) -> None:
        """The new worker's memory is there."""
        rank, incarnation = seat
        roles = self._design.roles_of(rank)
        names = [needed.name for needed in self._design.memory_of(seat)]
        memory = [fd for name in names if (fd := self._memory.held(name)) is not None]
        worker = StartWorker(
            rank=rank,
            incarnation=incarnation,
            roles=roles,
            settings=self._design.settings,
            num_workers=len(self._design.seats),
            slots=self._design.slots_of(rank),
            detect_ms=self._detect_ms,
            memory=tuple(names[1:]),
            device_index=max(self._design.device_of(rank), 0),
            num_attention=self._design.num_attention,
            num_attention_on_device=self._design.num_attention_beside(rank),
            lane_slots=self._design.lane_slots,
        )
        self._supervisor.send(Provision(start=worker), fds=memory)
        provisioned = WorkerProvisioned(process="orchestrator", rank=rank, incarnation=incarnation, roles=roles)
        self._event_log.append(provisioned)
