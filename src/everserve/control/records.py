"""What the orchestrator tells about its decisions: typed events, and lines in its log."""

import logging
import time
from typing import assert_never

from everserve.control import effects, events
from everserve.control.design import describe
from everserve.control.machine import Machine
from everserve.control.repairs import Repairs
from everserve.control.scaling import size_of
from everserve.control.slowness import Standing
from everserve.tables.goal import Capacity
from everserve.tables.ids import Rank
from everserve.wire.events import (
    AnyEvent,
    BalanceDecided,
    DeviceHealthEvent,
    EpochPublished,
    EventLog,
    ExpertsMasked,
    ExpertsMoved,
    FaultDetected,
    MaskLifted,
    OrchestratorRecovered,
    ScaleBegan,
    ScaleDone,
    SwitchBegan,
    SwitchDone,
    WorkerBackedOff,
    WorkerLeft,
    WorkerRecovered,
    WorkerSlow,
)
from everserve.wire.messages import SlotsReported

log = logging.getLogger(__name__)


class Records:
    """Of one orchestrator, which began at `began_s`."""

    def __init__(self, events: EventLog, machine: Machine, capacity: Capacity, began_s: float) -> None:
        self._events = events
        self._machine = machine
        self._capacity = capacity
        self._began_s = began_s
        self._repairs = Repairs(machine)

    def append(self, event: AnyEvent) -> None:
        self._events.append(event)

    def note(self, effect: effects.Told) -> None:
        """An effect that is only told."""
        match effect:
            case effects.BalanceDecided():
                self._note_balance(effect)
            case effects.LevelChanged():
                self._note_level(effect)
            case effects.SlownessDecided():
                self._note_slowness(effect)
            case effects.BackOff():
                self._note_delay(effect)
            case effects.BeginScaling() | effects.EndScaling():
                self._note_scaling(effect)
            case effects.BeginSwitch() | effects.EndSwitch():
                self._note_switch(effect)
            case effects.ChangeMask():
                self._note_mask(effect)
            case _:
                assert_never(effect)

    def note_placement(self) -> None:
        goal = self._machine.goal
        if goal.placement is not None:
            self._events.append(describe(goal, goal.placement, self._capacity))

    def note_repairs(self, event: events.AnyEvent | None, decision: effects.Decision) -> None:
        """How far they are after this decision."""
        for phase in self._repairs.note(event, decision, time.monotonic()):
            self._events.append(phase)

    def note_epoch(self, effect: effects.Publish, reason: str) -> None:
        epoch = effect.members.epoch
        log.info("epoch %d: %s", epoch, reason)
        published = EpochPublished(process="orchestrator", epoch=epoch, reason=reason, violations=effect.violations)
        self._events.append(published)

    def _note_level(self, effect: effects.LevelChanged) -> None:
        health = effect.health
        log.warning("device %d has health level %d (%s): %s", health.device, health.level, health.reason, effect.done)
        self._events.append(
            DeviceHealthEvent(
                process="orchestrator",
                device=health.device,
                level=health.level,
                before=effect.before,
                reason=health.reason,
                done=effect.done,
            )
        )

    def _note_switch(self, effect: effects.BeginSwitch | effects.EndSwitch) -> None:
        if isinstance(effect, effects.BeginSwitch):
            log.info("%s", effect.reason)
            began = SwitchBegan(process="orchestrator", rank=effect.rank, role=effect.role, reason=effect.reason)
            self._events.append(began)
            return
        took_s = time.monotonic() - effect.began_s
        log.info("rank %d is ready as %s worker, %.2f s after that was decided", effect.rank, effect.role, took_s)
        self._events.append(SwitchDone(process="orchestrator", rank=effect.rank, role=effect.role, took_s=took_s))

    def _note_mask(self, effect: effects.ChangeMask) -> None:
        placement, mask = self._machine.goal.placement, effect.mask
        if not mask.experts or placement is None:
            log.warning("the mask is lifted: %s", effect.reason)
            self._events.append(MaskLifted(process="orchestrator", reason=effect.reason))
            return
        experts = [(placement.moe_layers[layer], expert) for layer, expert in mask.experts]
        log.warning("%s", effect.reason)
        self._events.append(
            ExpertsMasked(process="orchestrator", mask_id=mask.id, experts=experts, reason=effect.reason)
        )

    def _note_scaling(self, effect: effects.BeginScaling | effects.EndScaling) -> None:
        size = size_of(self._machine.goal)
        if isinstance(effect, effects.BeginScaling):
            log.info("scaling to %s", size)
            began = ScaleBegan(process="orchestrator", **size._asdict(), added=effect.added, retired=effect.retired)
            self._events.append(began)
            return
        took_s = time.monotonic() - effect.began_s
        log.info("scaled to %s in %.2f s", size, took_s)
        self._events.append(ScaleDone(process="orchestrator", **size._asdict(), took_s=took_s))
        self.note_placement()

    def note_moves(self, rank: Rank, message: SlotsReported) -> None:
        for source in sorted({filled.source for filled in message.filled}):
            moved = [filled for filled in message.filled if filled.source is source]
            self._events.append(
                ExpertsMoved(
                    process="orchestrator",
                    rank=rank,
                    source=source,
                    num_experts=len(moved),
                    num_bytes=sum(filled.num_bytes for filled in moved),
                    took_s=sum(filled.seconds for filled in moved),
                )
            )
        if message.failed:
            num, last = len(message.failed), message.failed[-1]
            log.warning("worker %d could not load %d experts; expert %d: %s", rank, num, last.expert, last.reason)

    def note_loss(self, effect: effects.Lost) -> None:
        if effect.cause == "left":
            left = WorkerLeft(process="orchestrator", rank=effect.rank, incarnation=effect.incarnation)
            self._events.append(left)
        elif not effect.is_expected:
            log.warning("worker %d is gone: %s", effect.rank, effect.reason)
            self._events.append(
                FaultDetected(
                    process="orchestrator",
                    rank=effect.rank,
                    incarnation=effect.incarnation,
                    roles=effect.roles,
                    cause=effect.cause,
                    reason=effect.reason,
                )
            )

    def _note_delay(self, effect: effects.BackOff) -> None:
        rank, num_crashes, delay_s = effect.rank, effect.num_crashes, effect.delay_s
        log.warning("worker %d ended %d times while starting; next start in %.1f s", rank, num_crashes, delay_s)
        waits = WorkerBackedOff(process="orchestrator", rank=rank, num_crashes=num_crashes, delay_s=delay_s)
        self._events.append(waits)

    def _note_balance(self, effect: effects.BalanceDecided) -> None:
        log.info("balance: %s", effect.reason)
        self._events.append(
            BalanceDecided(
                process="orchestrator",
                is_accepted=effect.is_accepted,
                reason=effect.reason,
                max_over_mean=effect.max_over_mean,
                expected=effect.expected,
                num_moves=effect.num_moves,
                goal=self._machine.goal.version,
            )
        )

    def _note_slowness(self, effect: effects.SlownessDecided) -> None:
        verdict, incarnation = effect.verdict, effect.incarnation
        log.warning("worker %d, slowness: %s: %s", verdict.rank, verdict.level, verdict.reason)
        if verdict.level is Standing.FINE:
            self._events.append(
                WorkerRecovered(
                    process="orchestrator", rank=verdict.rank, incarnation=incarnation, reason=verdict.reason
                )
            )
        elif verdict.level is not Standing.TRIAL:
            self._events.append(
                WorkerSlow(
                    process="orchestrator",
                    rank=verdict.rank,
                    incarnation=incarnation,
                    level=verdict.level,
                    ratio=verdict.ratio,
                    reason=verdict.reason,
                )
            )

    def note_resumed(self, effect: effects.Resumed) -> None:
        epoch, took_s = self._machine.epoch, time.monotonic() - self._began_s
        log.warning("a new orchestrator: epoch %d, rebuilt in %.2f s", epoch, took_s)
        self._events.append(
            OrchestratorRecovered(
                process="orchestrator",
                epoch=epoch,
                num_reports=effect.num_reports,
                num_missing=effect.num_missing,
                took_s=took_s,
            )
        )
