"""When the machine is told what: one event after the other, each decision carried out before the next is made.

Whoever notices something tells it here. Until a recovery is over, events wait: the machine has nothing to decide with.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from everserve.control import effects, events
from everserve.control.machine import Found, Machine
from everserve.control.recovery import Recovery
from everserve.tables.ids import Epoch, WorkerId
from everserve.tables.members import WorkerState

CarryOut = Callable[[effects.Decision], None]


class Deciding:
    """The machine, and the events that it has not heard yet."""

    def __init__(self, machine: Machine, recovery: Recovery | None, carry_out: CarryOut) -> None:
        self.recovery = recovery  # None: it is over, or nobody was here before us
        self._machine = machine
        self._carry_out = carry_out
        self._undecided: deque[events.AnyEvent] = deque()
        self._is_deciding = False

    def start(self) -> None:
        """Nobody was here before us."""
        self._decide(lambda: self._machine.start(time.monotonic()))

    def resume(self, found: Sequence[Found], epoch: Epoch, was_all_ready: bool) -> None:
        """The recovery is over: all that can be known is known. Events that have waited come after its decision."""
        self.recovery = None
        self._decide(lambda: self._machine.resume(time.monotonic(), found, epoch, was_all_ready))

    def tell(self, event: events.AnyEvent) -> None:
        """What an effect leads to is decided when all effects before it are done."""
        self._undecided.append(event)
        if not self._is_deciding and self.recovery is None:
            self._decide_waiting()

    def ask(self, event: events.AnyEvent) -> effects.Decision:
        """As `tell`, for whoever wants to know what became of it; neither in a recovery nor in an effect."""
        return self._decide(lambda: self._machine.handle(event, time.monotonic()))

    def _decide(self, decide: Callable[[], effects.Decision]) -> effects.Decision:
        """One decision, carried out before any other is made; then whatever its effects have led to."""
        assert not self._is_deciding, "effects tell, they do not ask"
        self._is_deciding = True
        decision = decide()
        self._carry_out(decision)
        self._is_deciding = False
        self._decide_waiting()
        return decision

    def _decide_waiting(self) -> None:
        self._is_deciding = True
        while self._undecided:
            self._carry_out(self._machine.handle(self._undecided.popleft(), time.monotonic()))
        self._is_deciding = False

    def tick(self) -> None:
        """If a time that the machine has named is over."""
        deadline = self.next_deadline()
        if deadline is not None and time.monotonic() >= deadline and self.recovery is None:
            self.tell(events.Tick())

    def next_deadline(self) -> float | None:
        return self.recovery.deadline if self.recovery is not None else self._machine.next_deadline()

    def tables(self) -> effects.Publish:
        """What was published last."""
        return self._machine.tables()

    def is_lost(self, seat: WorkerId) -> bool:
        """Whether it was given up, maybe before it came to be. While we recover nobody is."""
        if self.recovery is not None:
            return False
        worker = next(worker for worker in self._machine.members.workers if worker.rank == seat[0])
        return worker.incarnation != seat[1] or worker.state is WorkerState.GONE
