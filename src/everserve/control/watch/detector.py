"""Detects dead and silent workers: a warden watches life words and pulses, and changes become the machine's inputs.

A crash shows in the life word at once. Silence alone is ambiguous: before it is reported to the machine, the process
state is read from the kernel, which distinguishes a stopped process from one that gets no CPU; and its cell says
whether its warden is silent because the main thread hangs.
"""

import os
from collections.abc import Callable

from everserve.control.decide import inputs
from everserve.control.hold.worker_ends import WorkerEnd
from everserve.memory.liveness import ORCHESTRATOR_WORD, PeerState, Warden
from everserve.procs import process
from everserve.tables.ids import Incarnation, Rank

Seen = Callable[[Rank, Incarnation], inputs.AnyInput]


class Detector:
    """Readable (for select) when the state of a worker has changed. `detect_ms` 0: never."""

    def __init__(self, detect_ms: float) -> None:
        self._is_on = detect_ms > 0
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._warden = Warden(None, detect_ms or 1.0, event_fd=self._event_fd)
        if self._is_on:
            self._warden.start()
        self._watched: dict[Rank, WorkerEnd] = {}

    def fileno(self) -> int:
        return self._event_fd

    def watch(self, end: WorkerEnd) -> None:
        """A new incarnation replaces the old one, whose end is known by then; an old incarnation replaces none."""
        old = self._watched.get(end.rank)
        if not self._is_on or (old is not None and old.incarnation > end.incarnation):
            return
        if old is not None:
            self.unwatch(old)
        self._watched[end.rank] = end
        self._warden.watch(end.rank, end.cell, ORCHESTRATOR_WORD)

    def unwatch(self, end: WorkerEnd) -> None:
        if self._watched.get(end.rank) is end:
            del self._watched[end.rank]
            self._warden.unwatch(end.rank)

    def changes(self) -> list[tuple[Rank, Incarnation, Seen]]:
        """The changes since the last call."""
        os.eventfd_read(self._event_fd)
        found: list[tuple[Rank, Incarnation, Seen]] = []
        for key, state in self._warden.changes():
            end = self._watched.get(Rank(key))
            if end is not None:
                found.append((end.rank, end.incarnation, self._judge(end, state)))
        return found

    def probe(self, end: WorkerEnd) -> Seen:
        """Check this worker now, because a peer suspects it."""
        if self._watched.get(end.rank) is not end:
            return inputs.Alive  # not watched: the end of its channel or its exit will show a death
        return self._judge(end, self._warden.state(end.rank))

    def _judge(self, end: WorkerEnd, state: PeerState) -> Seen:
        if state is PeerState.DIED:
            return inputs.Died
        if state is PeerState.SILENT:
            letter, is_hung = _letter_of(end), end.cell.lease_is_over
            return lambda rank, incarnation: inputs.Silent(rank, incarnation, letter, is_hung)
        return inputs.Alive


def _letter_of(end: WorkerEnd) -> str | None:
    """The state of its process; where that is on another host, as its carrier has said it. What was not said yet is no
    sign of a stop."""
    return process.state_of(end.pid) if end.host == 0 else end.cell.letter or "S"
