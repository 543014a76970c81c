"""What the orchestrator tells about its decisions: typed events, with a line in its log where operators should see one.

Most are effects of the machine, as they are. Here is what it cannot say: about tables, losses and slots, which are more
than told, and what took how long since this process began.
"""

import logging
import time

from everserve.control.decide import effects, inputs
from everserve.control.decide.machine import Machine
from everserve.control.hold.design import describe
from everserve.control.tell.repairs import Repairs
from everserve.tables.goal import Capacity
from everserve.tables.ids import Rank
from everserve.wire import events
from everserve.wire.event_log import EventLog
from everserve.wire.messages import SlotsReported
from everserve.words import count, size

log = logging.getLogger(__name__)


class Records:
    """The events and records of one orchestrator, which began at `began_s`."""

    def __init__(self, event_log: EventLog, machine: Machine, capacity: Capacity, began_s: float) -> None:
        self._event_log = event_log
        self._machine = machine
        self._capacity = capacity
        self._began_s = began_s
        self._repairs = Repairs(machine)

    def append(self, event: events.AnyEvent) -> None:
        said = _line(event)
        if said is not None:
            log.log(*said)
        self._event_log.append(event)
        if isinstance(event, events.ScaleDone):
            self.note_placement()

    def note_placement(self) -> None:
        goal = self._machine.goal
        if goal.placement is not None:
            self.append(describe(goal, goal.placement, self._capacity))

    def note(self, given: inputs.AnyInput | None, decision: effects.Decision) -> None:
        """What a worker has moved, and how far repairs are after this decision."""
        if isinstance(given, inputs.Said) and isinstance(given.message, SlotsReported):
            self._note_moves(given.rank, given.message)
        for phase in self._repairs.note(given, decision, time.monotonic()):
            self.append(phase)

    def note_epoch(self, effect: effects.Publish, reason: str) -> None:
        self.append(
            events.EpochPublished(epoch=effect.members.epoch, reason=reason, violations=effect.conditions.violations)
        )

    def note_loss(self, effect: effects.Lost) -> None:
        if effect.cause == "left":
            self.append(events.WorkerLeft(rank=effect.rank, incarnation=effect.incarnation))
        elif not effect.is_expected:
            detected = events.FaultDetected(
                rank=effect.rank,
                incarnation=effect.incarnation,
                roles=effect.roles,
                cause=effect.cause,
                reason=effect.reason,
            )
            self.append(detected)

    def _note_moves(self, rank: Rank, message: SlotsReported) -> None:
        for source in sorted({filled.source for filled in message.filled}):
            moved = [filled for filled in message.filled if filled.source is source]
            self.append(
                events.ExpertsMoved(
                    rank=rank,
                    source=source,
                    num_experts=len(moved),
                    num_bytes=sum(filled.num_bytes for filled in moved),
                    took_s=sum(filled.seconds for filled in moved),
                )
            )
        if message.failed:
            num, last = len(message.failed), message.failed[-1]
            what = count(num, "expert")
            log.warning("worker %d could not load %s; expert %d: %s", rank, what, last.expert, last.reason)

    def note_resumed(self, effect: effects.Resumed) -> None:
        self.append(
            events.OrchestratorRecovered(
                epoch=self._machine.epoch,
                num_reports=effect.num_reports,
                num_missing=effect.num_missing,
                took_s=time.monotonic() - self._began_s,
            )
        )


def _line(event: events.AnyEvent) -> tuple[int, str] | None:
    """The level and the text for the log; None: not for operators."""
    match event:
        case events.EpochPublished():
            return logging.INFO, f"epoch {event.epoch}: {event.reason}"
        case events.BalanceDecided():
            return logging.INFO, f"balance: {event.reason}"
        case events.ScaleBegan():
            return logging.INFO, f"scaling to {size(event.attention, event.expert, event.devices)}"
        case events.ScaleDone():
            return (
                logging.INFO,
                f"scaled to {size(event.attention, event.expert, event.devices)} in {event.took_s:.2f} s",
            )
        case events.SwitchBegan():
            return logging.INFO, event.reason
        case events.SwitchDone():
            took = f"{event.took_s:.2f} s after that was decided"
            return logging.INFO, f"rank {event.rank} is ready as {event.role} worker, {took}"
        case events.FaultDetected():
            return logging.WARNING, f"worker {event.rank} is gone: {event.reason}"
        case events.WorkerBackedOff():
            times = count(event.num_crashes, "time")
            delay = f"next start in {event.delay_s:.1f} s"
            return logging.WARNING, f"worker {event.rank} ended {times} while starting; {delay}"
        case events.WorkerSlow():
            return logging.WARNING, f"worker {event.rank}, slowness: {event.level}: {event.reason}"
        case events.WorkerRecovered():
            return logging.WARNING, f"worker {event.rank}, slowness: fine: {event.reason}"
        case events.DeviceHealthChanged():
            level = f"health level {event.level} ({event.reason})"
            return logging.WARNING, f"device {event.device} has {level}: {event.done}"
        case events.ExpertsMasked():
            return logging.WARNING, event.reason
        case events.MaskLifted():
            return logging.WARNING, f"the mask is lifted: {event.reason}"
        case events.OrchestratorRecovered():
            return logging.WARNING, f"a new orchestrator: epoch {event.epoch}, rebuilt in {event.took_s:.2f} s"
    return None
