"""How far the repair of lost expert workers is, for events: planned (other places are the goal, or workers map what was
lost), first slot, covered, redundant."""

from collections.abc import Iterator

from everserve.control.decide import effects, inputs
from everserve.control.decide.machine import Machine
from everserve.tables.ids import Role
from everserve.wire.events import RepairPhase
from everserve.wire.messages import FillSlots, KeepGoal, SlotsReported


class Repairs:
    """Looks at every decision of the machine. Losses during a repair belong to it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._began_s: float | None = None
        self._told: set[str] = set()

    def note(self, given: inputs.AnyInput | None, decision: effects.Decision, now: float) -> Iterator[RepairPhase]:
        """`given`: what the decision was about, if it was about one."""
        losses = [effect for effect in decision.effects if isinstance(effect, effects.Lost) and effect.cause != "left"]
        if any(lost.roles == (Role.EXPERT,) for lost in losses):
            if self._began_s is None:
                self._began_s = now
            self._told.clear()
        if self._began_s is None or self._machine.has_postponed:
            return
        num_lost = self._num_without_place
        told = [effect.message for effect in decision.effects if isinstance(effect, effects.Tell)]
        is_mapped = num_lost > 0 and any(isinstance(message, FillSlots) for message in told)
        if is_mapped or any(isinstance(effect, KeepGoal) for effect in decision.effects):
            yield from self._tell("planned", num_lost, now)
        has_reported = isinstance(given, inputs.Said) and isinstance(given.message, SlotsReported)
        if has_reported and "planned" in self._told:
            yield from self._tell("first slot", num_lost, now)
        if num_lost == 0:
            yield from self._tell("covered", num_lost, now)
            if self._machine.is_as_planned:
                yield from self._tell("redundant", num_lost, now)
                self._began_s = None

    def _tell(self, phase: str, num_lost: int, now: float) -> Iterator[RepairPhase]:
        if phase not in self._told and self._began_s is not None:
            self._told.add(phase)
            yield RepairPhase(
                phase=phase,
                since_s=now - self._began_s,
                num_experts_without_place=num_lost,
            )

    @property
    def _num_without_place(self) -> int:
        routes = self._machine.routes
        return routes.num_lost if routes is not None else 0  # masked ones too
