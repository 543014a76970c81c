"""The process around the machine: what is said and observed goes in, decisions become messages.

    a message, a death, a silence  ->  machine.handle(input, now)  ->  effects  ->  messages
    from_*.py, worker_traffic.py       input_queue.py                  executor.py

All decisions are in machine.py. Slow or remote work is requested by the executor, and its result comes back as another
input. A failure takes this way from left to right: the detector notices it (`read_detector`), or a peer, the supervisor
or the end of a channel tells of it.

If there was an orchestrator before, it starts with a recovery (recovery.py): the supervisor sends a channel to each
existing worker, the workers report their state, and only then does the machine resume. Inputs wait until then.
"""

import selectors
import time

from everserve.control.hold.catalog import Catalog
from everserve.control.hold.hosts import Hosts
from everserve.control.hold.kv_groups import KvGroups
from everserve.control.hold.log_references import Logs
from everserve.control.hold.provisioning import Provisioning
from everserve.control.hold.readers import Readers
from everserve.control.hold.seat_memory import SeatMemory
from everserve.control.hold.worker_ends import WorkerEnds
from everserve.control.run.decider import make_decider
from everserve.control.run.executor import Executor
from everserve.control.run.from_carrier import FromCarrier
from everserve.control.run.from_gateway import FromGateway
from everserve.control.run.from_supervisor import FromAnchor, FromSupervisor
from everserve.control.run.health_watch import HealthWatch
from everserve.control.run.injection import Injection
from everserve.control.run.input_queue import InputQueue
from everserve.control.run.recovery import Recovery
from everserve.control.run.worker_traffic import WorkerTraffic
from everserve.control.tell.experts_view import ExpertsView
from everserve.control.tell.records import Records
from everserve.control.tell.survivals_view import SurvivalsView
from everserve.control.tell.to_gateway import GatewayEnds
from everserve.control.watch.detector import Detector
from everserve.memory.anchor_client import AnchorClient
from everserve.tables.goal import Goal
from everserve.wire.channel import RETRY_S, Channel
from everserve.wire.event_log import EventLog
from everserve.wire.messages import StartOrchestrator


class Orchestrator:
    """One instance's orchestrator, from start to end."""

    def __init__(self, start: StartOrchestrator, supervisor: Channel, gateway: Channel) -> None:
        self._began_s = time.monotonic()
        self._start = start
        self._supervisor = supervisor
        self._gateway = GatewayEnds(gateway)  # those with other numbers are attached later
        self._selector = selectors.DefaultSelector()
        self._machine, self._needs = make_decider(start)
        recovery = None
        if start.found is not None:
            others = self._machine.goal.hosts - {0, *self._machine.goal.lost_hosts}
            recovery = Recovery(start.found, self._began_s, start.num_gateways, others)
        self._queue = InputQueue(self._machine, recovery, start.is_serving)
        self._hold()
        self._tell()
        self._connect()
        if self._machine.goal.placement is not None and recovery is None:
            self._records.note_placement()
            self._needs.describe_backup()
            self._needs.describe_shadows(self._machine.goal)

    def _hold(self) -> None:
        """What workers are made of and keep."""
        needs, tell = self._needs, self._queue.tell
        self._hosts = hosts = Hosts(self._supervisor)
        self._anchor = anchor = AnchorClient()
        self._ends = ends = WorkerEnds(anchor, needs, self._goal, tell)
        self._catalog = catalog = Catalog(anchor, ends, hosts, Readers(needs, self._goal))
        self._logs = logs = Logs(catalog, self._start.num_gateways)
        self.memory = SeatMemory(catalog=catalog, needs=needs, logs=logs, goal=self._goal)
        self._provisioning = Provisioning(needs, anchor, catalog, ends, logs, hosts, tell)

    def _tell(self) -> None:
        """Where it is told what is decided."""
        event_log = EventLog("orchestrator", self._start.worker.event_log, self._gateway.tell)
        capacity = self._needs.capacity
        self._records = Records(event_log, self._machine, capacity, self._began_s)
        self._experts_view = ExpertsView(self._gateway)
        self._survivals_view = SurvivalsView(self._gateway, capacity, self._start.worker.log)
        self._kv_groups = self._make_kv_groups()

    def _connect(self) -> None:
        """Readers of channels put inputs into the queue; the executor carries out what is decided about them."""
        machine, queue, gateway, supervisor = self._machine, self._queue, self._gateway, self._supervisor
        self._detector = Detector(self._start.cluster.detect_ms)
        self._health = HealthWatch(self._start, machine, queue, gateway)
        self._workers = workers = WorkerTraffic(
            machine=machine,
            queue=queue,
            selector=self._selector,
            ends=self._ends,
            catalog=self._catalog,
            detector=self._detector,
            gateway=gateway,
        )
        injection = Injection(self._ends, self._hosts, gateway, self._records)
        self._from_gateway = FromGateway(
            queue=queue,
            selector=self._selector,
            gateway=gateway,
            workers=workers,
            logs=self._logs,
            injection=injection,
        )
        from_carrier = FromCarrier(
            queue=queue,
            selector=self._selector,
            hosts=self._hosts,
            anchor=self._anchor,
            provisioning=self._provisioning,
            workers=workers,
            injection=injection,
            machine=machine,
            num_awaited=0 if queue.is_recovering else self._start.cluster.hosts - 1,
        )
        self._from_supervisor = FromSupervisor(
            machine=machine,
            queue=queue,
            supervisor=supervisor,
            anchor=FromAnchor(anchor=self._anchor, selector=self._selector),
            provisioning=self._provisioning,
            workers=workers,
            injection=injection,
            gateway=self._from_gateway,
            carrier=from_carrier,
        )
        self._from_carrier = from_carrier
        executor = Executor(
            machine=machine,
            queue=queue,
            supervisor=supervisor,
            hosts=self._hosts,
            gateway=gateway,
            workers=workers,
            memory=self.memory,
            provisioning=self._provisioning,
            health=self._health,
            records=self._records,
        )
        queue.carry_out = executor.carry_out
        queue.on_resumed = from_carrier.say_missing

    def _make_kv_groups(self) -> KvGroups | None:
        """Where heads' KV has a parity."""
        needs = self._needs
        if not needs.model.divides_heads or needs.settings.log.kv_shadow != "parity":
            return None
        assert needs.capacity.devices is not None, "divided heads have devices"
        return KvGroups(self._ends, self._logs, needs.capacity.devices)

    def _goal(self) -> Goal:
        return self._machine.goal

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
        selector = self._selector
        selector.register(self._supervisor, selectors.EVENT_READ, self._from_supervisor.read)
        self._from_gateway.register(0)
        selector.register(self._detector, selectors.EVENT_READ, self._workers.read_detector)
        selector.register(self._health.inbox, selectors.EVENT_READ, self._health.read)
        if not self._queue.is_recovering:
            self._from_carrier.begin()
        self._from_supervisor.read()  # messages that came together with the first one

    def turn(self, timeout_s: float) -> None:
        """One turn of the loop: wait for input, handle it, run what is due, flush."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        self._queue.tick()
        self._flush()

    # -- once in every turn ----------------------------------------------------------------------

    def _flush(self) -> None:
        tables = None
        if not self._queue.is_recovering:
            tables = self._machine.tables()
            self._gateway.count_slowness(self._machine.slowness)
            self._experts_view.flush(self._machine, time.monotonic())
            self._survivals_view.flush(self._machine, time.monotonic())
            if self._kv_groups is not None:
                self._kv_groups.flush(self._machine)
        self._gateway.flush(tables, self._machine.moves, self._machine.mapping)
        for channel in self._helpers():
            channel.flush()
        for end in self._ends:
            end.flush()

    def _helpers(self) -> list[Channel]:
        channels = (self._supervisor, self._anchor.channel, self._hosts.carrier)
        return [channel for channel in channels if channel is not None]

    def _channels(self) -> list[Channel]:
        return self._helpers() + [end.control for end in self._ends if end.control is not None]

    def _timeout_s(self) -> float:
        deadline = self._queue.next_deadline()
        idle_s = RETRY_S if any(channel.wants_write for channel in self._channels()) else 0.5
        return idle_s if deadline is None else min(idle_s, max(0.0, deadline - time.monotonic()))
