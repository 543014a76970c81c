"""Effects become messages: to workers, to the gateway, to the supervisor. What comes of them is another event."""

import logging
import signal
from typing import assert_never

from everserve.control import effects
from everserve.control.detector import Detector
from everserve.control.event_queue import Deciding
from everserve.control.log_references import Logs
from everserve.control.provisioning import Births
from everserve.control.to_gateway import GatewayEnd
from everserve.control.worker_ends import WorkerEnds
from everserve.tables.ids import Role, WorkerId
from everserve.wire.channel import Channel
from everserve.wire.events import EpochPublished, EventLog, FaultDetected, WorkerBackedOff, WorkerLeft
from everserve.wire.messages import Failed, Fenced, Leave, Ready, RoutesChanged, SignalWorker

log = logging.getLogger(__name__)


class Acting:
    """Does what the machine wants done."""

    def __init__(
        self,
        ends: WorkerEnds,
        logs: Logs,
        births: Births,
        detector: Detector,
        deciding: Deciding,
        gateway: GatewayEnd,
        supervisor: Channel,
        event_log: EventLog,
    ) -> None:
        self.has_given_up = False
        self._ends = ends
        self._logs = logs
        self._births = births
        self._detector = detector
        self._deciding = deciding
        self._gateway = gateway
        self._supervisor = supervisor
        self._event_log = event_log

    def do(self, effect: effects.AnyEffect, reason: str) -> None:
        match effect:
            case effects.Lost():
                self._lose(effect)
            case effects.Publish():
                self._publish(effect, reason)
            case effects.Provision():
                self._births.provision(WorkerId(effect.rank, effect.incarnation))
            case effects.BackOff():
                self._back_off(effect)
            case effects.Probe():
                end = self._ends.get(effect.rank, effect.incarnation)
                if end is not None:
                    self._deciding.tell(self._detector.probe(end)(effect.rank, effect.incarnation))
            case effects.Kill():
                kill = SignalWorker(rank=effect.rank, incarnation=effect.incarnation, signal=signal.SIGKILL, id=None)
                self._supervisor.send(kill)
            case effects.AskToLeave():
                end = self._ends.get(effect.rank, effect.incarnation)
                if end is not None:
                    end.send(Leave())
            case effects.AllReady():
                self._supervisor.send(Ready())
            case effects.GiveUp():
                self._supervisor.send(Failed(reason=effect.reason, user_error=effect.user_error))
                self.has_given_up = True
            case _:
                assert_never(effect)

    def _publish(self, effect: effects.Publish, reason: str) -> None:
        epoch = effect.members.epoch
        log.info("epoch %d: %s", epoch, reason)
        published = EpochPublished(process="orchestrator", epoch=epoch, reason=reason, violations=effect.violations)
        self._event_log.append(published)
        if effect.routes is not None:
            for end in self._ends:
                if Role.ATTENTION in end.roles and end.is_connected:
                    end.send(RoutesChanged(routes=effect.routes))
        self._gateway.tell_cluster(effect)

    def _lose(self, effect: effects.Lost) -> None:
        """Fence it: whoever knows it is told, and what it says from now on is only counted."""
        self._record_loss(effect)
        self._gateway.tell_lost(effect)
        seat = WorkerId(effect.rank, effect.incarnation)
        end = self._ends.get(*seat)
        if end is not None:
            self._ends.part(end)
            end.send(Fenced(reason=effect.reason))
        if self._logs.has(seat):
            self._logs.lose(seat)
        elif end is None:
            self._births.call_off(seat)

    def _record_loss(self, effect: effects.Lost) -> None:
        if effect.cause == "left":
            left = WorkerLeft(process="orchestrator", rank=effect.rank, incarnation=effect.incarnation)
            self._event_log.append(left)
        elif not effect.is_expected:
            log.warning("worker %d is gone: %s", effect.rank, effect.reason)
            self._event_log.append(
                FaultDetected(
                    process="orchestrator",
                    rank=effect.rank,
                    incarnation=effect.incarnation,
                    roles=effect.roles,
                    cause=effect.cause,
                    reason=effect.reason,
                )
            )

    def _back_off(self, effect: effects.BackOff) -> None:
        rank, num_crashes, delay_s = effect.rank, effect.num_crashes, effect.delay_s
        log.warning("worker %d ended %d times while starting; next start in %.1f s", rank, num_crashes, delay_s)
        waits = WorkerBackedOff(process="orchestrator", rank=rank, num_crashes=num_crashes, delay_s=delay_s)
        self._event_log.append(waits)
