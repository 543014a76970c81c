"""SIGTERM to a worker: leave in order. The handler only takes a note; the loop looks at it between two steps."""

import os
import signal
from types import FrameType


class LeaveRequest:
    """Whether this worker was asked to leave, by a signal or by the orchestrator. Readable (for select) once it was."""

    def __init__(self) -> None:
        self.was_asked = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        signal.signal(signal.SIGTERM, self._on_signal)

    def fileno(self) -> int:
        return self._event_fd

    def ask(self) -> None:
        self.was_asked = True
        os.eventfd_write(self._event_fd, 1)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.ask()
