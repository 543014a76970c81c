"""The per-step undo log.

Everything a step changes before its forward pass is known to have succeeded (blocks taken, tables extended, queues
moved) is recorded here as its own inverse. A step that completes calls `commit`; one that is abandoned in the middle
calls `rollback`, which runs the inverses newest first. Running them in exactly that order is what makes cheap inverses
right, down to the order of the free list (see blocks.py).
"""

from collections.abc import Callable
from typing import Any


class UndoLog:
    """Inverses of what the current step has done so far."""

    def __init__(self) -> None:
        self._entries: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def record(self, inverse: Callable[..., Any], *args: Any) -> None:
        """Remember how to take back what was just done."""
        self._entries.append((inverse, args))

    def assign(self, owner: object, **values: object) -> None:
        """Set attributes, remembering what they were."""
        self._entries.append((_set_all, (owner, {name: getattr(owner, name) for name in values})))
        _set_all(owner, values)

    def commit(self) -> None:
        """The step happened."""
        self._entries.clear()

    def rollback(self) -> None:
        """The step never happened."""
        while self._entries:
            inverse, args = self._entries.pop()
            inverse(*args)

    def __len__(self) -> int:
        return len(self._entries)


def _set_all(owner: object, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)
