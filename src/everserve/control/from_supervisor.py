"""What the supervisor says: processes that exist or have ended, memory that it has kept, a new anchor, the end."""

import selectors

from everserve.control import events
from everserve.control.event_queue import EventQueue
from everserve.control.from_workers import FromWorkers
from everserve.control.injection import Injection
from everserve.control.parts import Parts
from everserve.tables.ids import WorkerId
from everserve.wire.channel import Channel, ChannelClosed, Descriptors
from everserve.wire.messages import (
    AnchorAttached,
    MemoryKept,
    Shutdown,
    Signalled,
    WorkerExited,
    WorkerStarted,
)


class FromSupervisor:
    """And from the anchor, whose channel comes through the supervisor."""

    def __init__(self, parts: Parts, queue: EventQueue, workers: FromWorkers, injection: Injection) -> None:
        self._parts = parts
        self._queue = queue
        self._workers = workers
        self._injection = injection

    def read(self) -> None:
        for message, fds in self._parts.supervisor.receive_frames():
            if isinstance(message, AnchorAttached):
                self._drop_anchor()  # the new anchor may be announced before the old channel ends
                (anchor_fd,) = fds.take()
                anchor = Channel.of_fd(anchor_fd)
                self._parts.selector.register(anchor, selectors.EVENT_READ, self._read_anchor)
                self._parts.anchor.attach(anchor)
            elif isinstance(message, WorkerStarted):
                self._on_started(message, fds)
            elif isinstance(message, MemoryKept):
                (memory_fd,) = fds.take()
                self._parts.provisioning.take_in_memory(message.memory, memory_fd)
            elif isinstance(message, WorkerExited):
                self._on_exited(message)
            elif isinstance(message, Signalled):
                self._injection.confirm(message)
            elif isinstance(message, Shutdown):
                self._queue.tell(events.Stopping())
                for end in self._parts.ends:
                    end.send(message)
                self._queue.is_over = True
            else:
                raise AssertionError(f"the supervisor does not send {type(message).__name__}")

    def _on_started(self, message: WorkerStarted, fds: Descriptors) -> None:
        """A new process; or, during a recovery, an existing one."""
        worker = WorkerId(message.start.rank, message.start.incarnation)
        is_lost = not self._queue.is_recovering and not self._parts.machine.counts(worker)
        end = self._parts.provisioning.take_in(message, fds.take(), is_lost)
        assert end.control is not None
        self._parts.selector.register(end.control, selectors.EVENT_READ, lambda: self._workers.read(end))
        if self._queue.is_recovering:
            end.cell.ring_control()  # it may be in the middle of a layer: makes it read its lifeline
            self._parts.detector.watch(end)
        self._queue.tell(events.Started(end.rank, end.incarnation, end.pid))

    def _on_exited(self, message: WorkerExited) -> None:
        worker = WorkerId(message.rank, message.incarnation)
        self._workers.read_pending(worker)
        self._queue.tell(events.Exited(worker.rank, worker.incarnation, message.exit_status))
        end = self._parts.ends.get(worker)
        if end is not None:
            if end.control is not None:
                self._parts.selector.unregister(end.control)
            self._parts.detector.unwatch(end)
            self._parts.ends.forget(end)

    def _read_anchor(self) -> None:
        if self._parts.anchor.channel is None:
            return
        try:
            self._parts.anchor.read()
        except ChannelClosed:
            self._drop_anchor()

    def _drop_anchor(self) -> None:
        if self._parts.anchor.channel is not None:
            self._parts.selector.unregister(self._parts.anchor.channel)
            self._parts.anchor.detach()
