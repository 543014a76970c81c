"""select() knows no descriptor above 1023, and a process that runs many tests may have more."""

import select
from collections.abc import Iterable
from typing import Protocol


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def num_readable(sources: Iterable[int | HasDescriptor], timeout_s: float = 0.0) -> int:
    """How many of these can be read, when one can be or the time is over."""
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    return len(poll.poll(1e3 * timeout_s))


def is_readable(source: int | HasDescriptor, timeout_s: float = 0.0) -> bool:
    return num_readable([source], timeout_s) > 0
