"""Events are decided one after the other, and each decision is carried out before the next.

    tell(event)  ->  machine.handle(event, now)  ->  carry_out(decision)

Where several wait, what they change is published with the last one: workers that die together are lost together.

During a recovery (recovery.py) events wait: the machine resumes when workers have reported, and then handles them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from everserve.control import effects, events
from everserve.control.machine import Machine
from everserve.control.recovery import Recovery

CarryOut = Callable[[effects.Decision, events.AnyEvent | None], None]


class EventQueue:
    """Around the machine of one instance. `carry_out` is set before the first event."""

    def __init__(self, machine: Machine, recovery: Recovery | None, was_serving: bool) -> None:
        self.carry_out: CarryOut = lambda decision, event: None
        self.is_over = False  # the instance stops, or is given up
        self._machine = machine
        self._recovery = recovery
        self._was_serving = was_serving
        self._undecided: deque[events.AnyEvent] = deque()
        self._is_deciding = False
        self._is_gathering = False

    @property
    def is_recovering(self) -> bool:
        return self._recovery is not None

    def tell(self, event: events.AnyEvent) -> None:
        """Queue an event. Events raised by an effect are decided after all effects of the current decision."""
        self._undecided.append(event)
        if self._recovery is not None:
            self._recovery.note(event)
        elif not self._is_deciding and not self._is_gathering:
            self._decide_waiting()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Events that are told inside are decided at the end."""
        assert not self._is_deciding and not self._is_gathering
        self._is_gathering = True
        try:
            yield
        finally:
            self._is_gathering = False
        if self._recovery is None:
            self._decide_waiting()

    def decide(self, decide: Callable[[float], effects.Decision]) -> effects.Decision:
        """Make one decision and carry it out before the next; then decide the events that its effects have raised."""
        assert not self._is_deciding, "an effect must queue its event with `tell`"
        self._is_deciding = True
        decision = decide(time.monotonic())
        self.carry_out(decision, None)
        self._is_deciding = False
        self._decide_waiting()
        return decision

    def _decide_waiting(self) -> None:
        self._is_deciding = True
        while self._undecided:
            event = self._undecided.popleft()
            self.carry_out(self._machine.handle(event, time.monotonic(), is_last=not self._undecided), event)
        self._is_deciding = False

    def tick(self) -> bool:
        """Handle what is due: the end of a recovery, or a deadline of the machine. Returns whether a recovery ended."""
        now = time.monotonic()
        recovery, deadline = self._recovery, self._machine.next_deadline()
        if recovery is not None:
            if not recovery.is_over(now):
                return False
            self._recovery = None
            self.decide(lambda now: self._machine.resume(now, recovery.found(), recovery.epoch, self._was_serving))
            return True
        if deadline is not None and now >= deadline:
            self.tell(events.Tick())
        return False

    def next_deadline(self) -> float | None:
        return self._recovery.deadline if self._recovery is not None else self._machine.next_deadline()
