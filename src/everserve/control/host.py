"""The process around the machine: messages become events, decisions become messages.

    a message, a death, a silence  ->  event  ->  machine.handle(event, now)  ->  effects  ->  messages
    from_*.py, detector.py             event_queue.py                             executor.py

All decisions are in machine.py. Slow or remote work is requested by the executor, and its result comes back as another
event. A failure takes this way from left to right: the detector notices it (`_read_detector`), or a peer, the
supervisor or the end of a channel tells of it.

If there was an orchestrator before, the host starts with a recovery (recovery.py): the supervisor sends a channel to
each existing worker, the workers report their state, and only then does the machine resume. Events wait until then.
"""

import selectors
import time

from everserve.control.event_queue import EventQueue
from everserve.control.executor import Executor
from everserve.control.experts_view import ExpertsView
from everserve.control.from_gateway import FromGateway
from everserve.control.from_supervisor import FromSupervisor
from everserve.control.from_workers import FromWorkers
from everserve.control.health_watch import HealthWatch
from everserve.control.injection import Injection
from everserve.control.kv_groups import KvGroups
from everserve.control.parts import Decider, Parts
from everserve.control.recovery import Recovery
from everserve.control.survivals_view import SurvivalsView
from everserve.tables.ids import WorkerId
from everserve.wire.channel import RETRY_S, Channel
from everserve.wire.messages import StartOrchestrator


class Host:
    """One instance's orchestrator, from start to end."""

    def __init__(self, start: StartOrchestrator, supervisor: Channel, gateway: Channel) -> None:
        began_s = time.monotonic()
        recovery = Recovery(start.found, began_s) if start.found is not None else None
        decider = Decider.of(start)
        self._queue = EventQueue(decider.machine, recovery, start.is_serving)
        self.parts = parts = Parts.of(start, decider, supervisor, gateway, self._queue.tell, began_s)
        self._machine = parts.machine
        self._gateway = parts.gateway
        self._experts_view = ExpertsView(parts.gateway)
        self._survivals_view = SurvivalsView(parts.gateway, parts.needs.capacity, start.worker.log)
        self._kv_groups = self._make_kv_groups()
        self._health = HealthWatch(parts, self._queue, start)
        injection = Injection(parts)
        self._workers = FromWorkers(parts, self._queue)
        self._from_supervisor = FromSupervisor(parts, self._queue, self._workers, injection)
        self._from_gateway = FromGateway(parts, self._queue, self._health, injection)
        self._queue.carry_out = Executor(parts, self._queue, self._workers).carry_out
        if self._machine.goal.placement is not None and recovery is None:
            parts.records.note_placement()
            parts.needs.describe_backup()
            parts.needs.describe_shadows(self._machine.goal)

    def _make_kv_groups(self) -> KvGroups | None:
        """Where heads' KV has a parity."""
        needs = self.parts.needs
        if not needs.model.divides_heads or needs.settings.log.kv_shadow != "parity":
            return None
        assert needs.capacity.devices is not None, "divided heads have devices"
        return KvGroups(self.parts.ends, self.parts.logs, needs.capacity.devices)

    @property
    def is_over(self) -> bool:
        return self._queue.is_over

    def run(self) -> None:
        """Until the supervisor sends Shutdown, or its channel ends (ChannelClosed)."""
        self.begin()
        while not self.is_over:
            self.turn(self._timeout_s())

    def begin(self) -> None:
        """Start, or wait for reports."""
        selector, parts = self.parts.selector, self.parts
        assert parts.gateway.channel is not None
        selector.register(parts.supervisor, selectors.EVENT_READ, self._from_supervisor.read)
        selector.register(parts.gateway.channel, selectors.EVENT_READ, self._from_gateway.read)
        selector.register(parts.detector, selectors.EVENT_READ, self._read_detector)
        selector.register(self._health.inbox, selectors.EVENT_READ, self._health.read)
        if not self._queue.is_recovering:
            self._queue.decide(self._machine.start)
        self._from_supervisor.read()  # messages that came together with the first one

    def turn(self, timeout_s: float) -> None:
        """One turn of the loop: wait for input, handle it, run what is due, flush."""
        for key, _ in self.parts.selector.select(timeout_s):
            key.data()
        if self._queue.tick():
            self._from_gateway.handle_early()
        self._flush()

    def _read_detector(self) -> None:
        """Workers that died, fell silent, or pulse again. What a worker said before its end explains more."""
        with self._queue.together():
            for rank, incarnation, found in self.parts.detector.changes():
                self._workers.read_pending(WorkerId(rank, incarnation))
                self._queue.tell(found(rank, incarnation))

    # -- once in every turn ----------------------------------------------------------------------

    def _flush(self) -> None:
        tables = None
        if not self._queue.is_recovering:
            tables = self._machine.tables()
            self._experts_view.flush(self._machine, time.monotonic())
            self._survivals_view.flush(self._machine, time.monotonic())
            if self._kv_groups is not None:
                self._kv_groups.flush(self._machine)
        self._gateway.flush(tables, self._machine.moves, self._machine.mapping)
        for channel in self._helpers():
            channel.flush()
        for end in self.parts.ends:
            end.flush()

    def _helpers(self) -> list[Channel]:
        return [channel for channel in (self.parts.supervisor, self.parts.anchor.channel) if channel is not None]

    def _channels(self) -> list[Channel]:
        return self._helpers() + [end.control for end in self.parts.ends if end.control is not None]

    def _timeout_s(self) -> float:
        deadline = self._queue.next_deadline()
        idle_s = RETRY_S if any(channel.wants_write for channel in self._channels()) else 0.5
        return idle_s if deadline is None else min(idle_s, max(0.0, deadline - time.monotonic()))
