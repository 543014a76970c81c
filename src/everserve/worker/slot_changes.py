"""Changes of expert slots while requests are served.

    FillSlots, ClearSlots ──> queue ──> begin ... poll ──> now and then, and after the last ──> SlotsReported
    StopChanges ──> what is in the queue counts as done

A fill runs beside the steps of the worker, and the loop polls for its end; there is one fill at a time. Its slot is
empty from `begin` until `poll` says that its weights are loaded and verified; requests for its old expert are refused.
A fill that fails leaves the slot empty, and is reported.

A new orchestrator assumes that nothing is pending: the queue is dropped. A fill that runs at that moment is given up,
its slot stays empty, and the next fill waits until it has ended.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from everserve.tables.ids import Rank
from everserve.tables.memory import MemoryName
from everserve.tables.slots import FailedFill, Fill, Filled, HeldSlots, Place
from everserve.wire.messages import ClearSlots, FillSlots, SlotsReported
from everserve.words import count

log = logging.getLogger(__name__)

_POLL_S = 0.001  # while a fill runs
_REPORT_S = 0.05  # between two reports on one message: streams may wait for what is filled, and each makes new routes


class ChangeableSlots(Protocol):
    """The expert slots of one worker, on any device. No request is computed while one of these methods runs."""

    @property
    def held(self) -> HeldSlots:
        """A slot that is being filled is empty."""

    def num_experts(self, call_index: int) -> int:
        """Experts, or other shards, that this layer of the model has."""

    def begin(self, fill: Fill) -> None:
        """Empty the slot and start to load. One fill at a time."""

    def poll(self) -> Filled | FailedFill | None:
        """The result of the fill that was begun, once; None while it runs."""

    def clear(self, place: Place) -> None:
        """Empty the slot; never called for a slot that is being filled."""

    def offer(self, rank: Rank | None, weights: MemoryName, fds: Sequence[int]) -> None:
        """Memory of a peer (None: the backup) that experts can be copied from, and its slot table: two descriptors,
        which are taken over. Replaces what this rank had offered."""

    def withdraw(self, rank: Rank | None) -> None:
        """This memory is not to be used any more: slots that map it are empty."""

    def tend(self) -> None:
        """Called a few times a second: end what can be ended now."""


class SlotChanges:
    """The queue of changes. `report` is called with the result of each message."""

    def __init__(self, slots: ChangeableSlots, report: Callable[[SlotsReported], None]) -> None:
        self._slots = slots
        self._report = report
        self._messages: deque[deque[Fill | Place]] = deque()
        self._filling: Fill | None = None
        self._is_given_up = False  # the fill that runs: no orchestrator waits for it
        self._filled: list[Filled] = []
        self._failed: list[FailedFill] = []
        self._num_done = 0  # of what this orchestrator has told
        self._report_at = 0.0
        self._num_slots = [*map(len, slots.held.experts)]  # never changes

    @property
    def is_pending(self) -> bool:
        return bool(self._messages) or self._filling is not None

    def wait_s(self, at_most_s: float) -> float:
        """How long the loop may wait for something else, before it calls `do_one`."""
        if self._filling is not None:
            return min(at_most_s, _POLL_S)
        return 0.0 if self._messages else at_most_s

    def add(self, message: FillSlots | ClearSlots) -> None:
        if not self._messages:
            self._report_at = time.monotonic() + _REPORT_S
        self._messages.append(deque(message.fills if isinstance(message, FillSlots) else message.places))

    def forget(self) -> None:
        """There is a new orchestrator."""
        self._messages.clear()
        self._num_done = 0
        self._filled, self._failed = [], []
        self._is_given_up = self._filling is not None

    def stop(self) -> None:
        """What was not begun is dropped. A fill that runs ends as it does."""
        for changes in self._messages:
            self._num_done += len(changes)
            changes.clear()

    def withdraw(self, rank: Rank | None) -> None:
        """Memory that experts can come from is gone. Report, if slots are empty for that."""
        before = self._slots.held
        self._slots.withdraw(rank)
        if self._slots.held != before:
            self._send()

    def do_one(self) -> None:
        """Change one slot, or begin to; report if it was the last one of its message, or if it is time to."""
        if self._filling is None and self._messages and self._messages[0]:
            self._change(self._messages[0].popleft())
        if self._filling is not None:
            self._poll(self._filling)
        if self._filling is None and self._messages:
            changes, now = self._messages[0], time.monotonic()
            if not changes:
                self._messages.popleft()
            elif not self._filled or now < self._report_at:
                return
            self._report_at = now + _REPORT_S
            self._send()

    def _send(self) -> None:
        filled, self._filled, failed, self._failed = self._filled, [], self._failed, []
        if failed:  # e.g. a missing file, no memory: other workers can serve these experts
            num, last = len(failed), failed[-1]
            log.error(
                "could not load %s; the last, expert %d of call %d: %s",
                *(count(num, "expert"), last.expert, last.call_index, last.reason),
            )
        self._report(SlotsReported(slots=self._slots.held, failed=failed, filled=filled, num_done=self._num_done))

    def _change(self, change: Fill | Place) -> None:
        if isinstance(change, Place):
            self._num_done += 1
            if self._is_there(change):
                self._slots.clear(change)
        elif self._is_there(change):
            self._slots.begin(change)
            self._filling = change
        else:
            self._num_done += 1
            self._failed.append(FailedFill(**change._asdict(), reason="there is no such slot, or no such expert"))

    def _poll(self, fill: Fill) -> None:
        result = self._slots.poll()
        if result is None:
            return
        self._filling = None
        if self._is_given_up:
            self._is_given_up = False
            self._slots.clear(Place(fill.call_index, fill.slot))
            return
        self._num_done += 1
        if isinstance(result, FailedFill):
            self._failed.append(result)
        else:
            self._filled.append(result)

    def _is_there(self, change: Fill | Place) -> bool:
        index = change.call_index
        is_slot = 0 <= index < len(self._num_slots) and 0 <= change.slot < self._num_slots[index]
        return is_slot and (isinstance(change, Place) or 0 <= change.expert < self._slots.num_experts(index))
