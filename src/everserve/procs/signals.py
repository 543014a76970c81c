"""Signals as bytes on a descriptor, so that a loop can wait for them with its selector."""

import selectors
import signal
import socket
from typing import Any


class SignalPipe:
    """Registers itself with the selector; `read` returns the numbers of the signals that arrived."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signals = [signal.SIGINT, signal.SIGTERM, signal.SIGCHLD]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            signals.append(signal.SIGHUP)
        self._previous: dict[signal.Signals, Any] = {s: signal.signal(s, lambda *_: None) for s in signals}
        selector.register(self._reader, selectors.EVENT_READ, self)

    @property
    def descriptors(self) -> tuple[int, int]:
        return self._reader.fileno(), self._writer.fileno()

    def read(self) -> bytes:
        return self._reader.recv(4096)

    def close(self) -> None:
        self._selector.unregister(self._reader)
        self.leave_to_parent()
        self._reader.close()
        self._writer.close()

    def leave_to_parent(self) -> None:
        """Leaves signals to the parent, in a child that has the same descriptors: its own signals are handled as
        before.
        """
        signal.set_wakeup_fd(-1)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
