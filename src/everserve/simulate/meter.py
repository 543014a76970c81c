"""What decisions cost: the core time that they take, and the bytes that they tell other processes.

An *event* here is what an operator would call one: a start, a loss, a return, with every decision that follows.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from everserve.wire.messages import AnyMessage, encode


@dataclass(slots=True)
class Event:
    """The decisions of one event."""

    name: str
    num_decisions: int = 0
    core_s: float = 0.0
    slowest_s: float = 0.0  # of one decision
    slowest: str = ""  # and what it was about
    num_bytes: int = 0  # told
    core_s_by_input: dict[str, float] = field(default_factory=dict)
    bytes_by_message: Counter[str] = field(default_factory=Counter)


class Meter:
    """Adds to the event that was begun last."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def begin(self, name: str) -> Event:
        self.events.append(Event(name))
        return self.events[-1]

    @contextmanager
    def decision(self, what: str) -> Iterator[None]:
        """Measures one decision."""
        before = time.process_time()
        yield
        took_s, event = time.process_time() - before, self.events[-1]
        event.num_decisions += 1
        event.core_s += took_s
        event.core_s_by_input[what] = event.core_s_by_input.get(what, 0.0) + took_s
        if took_s > event.slowest_s:
            event.slowest_s, event.slowest = took_s, what

    def told(self, message: AnyMessage, num_receivers: int = 1) -> None:
        """A message to so many processes."""
        num_bytes = len(encode(message)) * num_receivers
        self.events[-1].num_bytes += num_bytes
        self.events[-1].bytes_by_message[type(message).__name__] += num_bytes
