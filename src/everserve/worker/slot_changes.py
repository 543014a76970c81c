"""Changes of expert slots while requests are served: one slot at a time, between two batches.

    FillSlots, ClearSlots ──> queue ──one slot per turn of the loop──> the last one of a message ──> SlotsReported

A slot is empty from the start of its change until its weights are loaded; requests for its old expert are refused. A
fill that fails leaves the slot empty, and is reported.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from everserve.tables.slots import FailedFill, Fill, HeldSlots, Place
from everserve.wire.messages import ClearSlots, FillSlots, SlotsReported

log = logging.getLogger(__name__)


class ChangeableSlots(Protocol):
    """The expert slots of one worker, on any device. No request is computed while `fill` or `clear` runs."""

    @property
    def held(self) -> HeldSlots: ...

    @property
    def num_experts(self) -> int:
        """Experts of the model per layer."""

    def fill(self, fill: Fill) -> None:
        """Load an expert. The old one is gone, also if this raises."""

    def clear(self, place: Place) -> None: ...


class SlotChanges:
    """The queue of changes. `report` is called with the result of each message."""

    def __init__(self, slots: ChangeableSlots, report: Callable[[SlotsReported], None]) -> None:
        self._slots = slots
        self._report = report
        self._messages: deque[deque[Fill | Place]] = deque()
        self._failed: list[FailedFill] = []

    @property
    def is_pending(self) -> bool:
        return bool(self._messages)

    def add(self, message: FillSlots | ClearSlots) -> None:
        self._messages.append(deque(message.fills if isinstance(message, FillSlots) else message.places))

    def do_one(self) -> None:
        """Change one slot; report if it was the last one of its message."""
        changes = self._messages[0]
        if changes:
            self._change(changes.popleft())
        if not changes:
            self._messages.popleft()
            failed, self._failed = self._failed, []
            self._report(SlotsReported(slots=self._slots.held, failed=failed))

    def _change(self, change: Fill | Place) -> None:
        if not self._is_there(change):
            reason = "there is no such slot, or no such expert"
        elif isinstance(change, Place):
            self._slots.clear(change)
            return
        else:
            try:
                self._slots.fill(change)
                return
            except Exception as error:  # e.g. a missing file, no memory: other workers can serve this expert
                log.exception("expert %d could not be loaded", change.expert)
                reason = f"{type(error).__name__}: {error}"
        if isinstance(change, Fill):
            self._failed.append(FailedFill(**change._asdict(), reason=reason))

    def _is_there(self, change: Fill | Place) -> bool:
        held = self._slots.held
        is_slot = 0 <= change.layer_index < len(held.experts) and 0 <= change.slot < held.num_slots
        return is_slot and (isinstance(change, Place) or 0 <= change.expert < self._slots.num_experts)
