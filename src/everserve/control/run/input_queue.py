"""Inputs are decided one after the other, and each decision is carried out before the next.

    tell(input)  ->  machine.handle(input, now)  ->  carry_out(decision)

Where several wait, what they change is published with the last one: workers that die together are lost together.

During a recovery (recovery.py) inputs wait: the machine resumes when workers have reported, and then handles them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from everserve.control.decide import effects
from everserve.control.decide.inputs import AnyInput, Tick
from everserve.control.decide.machine import Machine
from everserve.control.run.recovery import Recovery

CarryOut = Callable[[effects.Decision, AnyInput | None], None]


class InputQueue:
    """Around the machine of one instance. `carry_out` is set before the first input."""

    def __init__(self, machine: Machine, recovery: Recovery | None, was_serving: bool) -> None:
        self.carry_out: CarryOut = lambda decision, given: None
        self.on_resumed: Callable[[], None] = lambda: None  # a recovery is over
        self.is_over = False  # the instance stops, or is given up
        self._machine = machine
        self._recovery = recovery
        self._was_serving = was_serving
        self._undecided: deque[AnyInput] = deque()
        self._is_deciding = False
        self._is_gathering = False

    @property
    def is_recovering(self) -> bool:
        return self._recovery is not None

    def tell(self, given: AnyInput) -> None:
        """Queue an input. Inputs raised by an effect are decided after all effects of the current decision."""
        self._undecided.append(given)
        if self._recovery is not None:
            self._recovery.note(given)
        elif not self._is_deciding and not self._is_gathering:
            self._decide_waiting()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inputs that are told inside are decided at the end."""
        assert not self._is_deciding and not self._is_gathering
        self._is_gathering = True
        try:
            yield
        finally:
            self._is_gathering = False
        if self._recovery is None:
            self._decide_waiting()

    def decide(self, decide: Callable[[float], effects.Decision]) -> None:
        """Make one decision and carry it out before the next; then decide the inputs that its effects have raised."""
        assert not self._is_deciding, "an effect must queue its input with `tell`"
        self._is_deciding = True
        self.carry_out(decide(time.monotonic()), None)
        self._is_deciding = False
        self._decide_waiting()

    def _decide_waiting(self) -> None:
        self._is_deciding = True
        while self._undecided:
            given = self._undecided.popleft()
            self.carry_out(self._machine.handle(given, time.monotonic(), is_last=not self._undecided), given)
        self._is_deciding = False

    def tick(self) -> None:
        """Handle what is due: the end of a recovery, or a deadline of the machine."""
        now, recovery, deadline = time.monotonic(), self._recovery, self._machine.next_deadline()
        if recovery is None:
            if deadline is not None and now >= deadline:
                self.tell(Tick())
        elif recovery.is_over(now):
            self._recovery = None
            self.decide(lambda now: self._machine.resume(now, recovery.found(), recovery.epoch, self._was_serving))
            self.on_resumed()

    def next_deadline(self) -> float | None:
        return self._recovery.deadline if self._recovery is not None else self._machine.next_deadline()
