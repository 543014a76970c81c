"""The supervisor's end of its channel to root (root.py), which is its parent and that of all processes it starts.

    supervisor ──{"start": name, ...}──────────────> root    answered by {"started": pid} or {"errno": ...}
    root       ──{"exited": pid, "status": ...}────> supervisor, one at a time
    supervisor ──{"recorded": pid}─────────────────> root    which reaps it
    supervisor ──{"tell": ...}, {"done": status}, {} ──> root    {}: nothing but a sign of life
    supervisor ──{"become": python}, {"has taken over": true} ──> root    an upgrade (upgrading.py)

Messages are whole packets, and descriptors are numbers: both processes have one table of them. Imports nothing but the
standard library, as root does.
"""

import json
import os
import select
import socket
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from everserve.procs import process

MOST_BYTES = 1 << 18  # of a message: more than the kernel takes
_PULSE_S = 1.0

here: "RootEnd | None" = None  # of this process, if it is a supervisor that root has just made


class Exit(NamedTuple):
    """A child of root has ended."""

    pid: int
    status: int  # negative: the signal that killed it


class RootEnd:
    """`stops`: signals that had asked the instance to end before this supervisor was made. `before`: the exit status of
    the supervisor before, if there was one. `own_fds`: those that no supervisor may close. `news`: "upgraded" in the
    first one of another version, which has to say that it has taken over; or why an upgrade has failed."""

    def __init__(
        self,
        sock: socket.socket,
        table_fd: int,
        root_pid: int,
        own_fds: frozenset[int],
        stops: tuple[int, ...] = (),
        before: int | None = None,
        news: str = "",
    ) -> None:
        self.table_fd = table_fd
        self.root_pid = root_pid
        self.stops = stops
        self.before = before
        self.news = news
        self._sock = sock
        self._own_fds = own_fds
        self._environment = dict(os.environ)  # root's own, which what it starts has too
        self._said: deque[dict[str, Any]] = deque()
        self._pulse_s = 0.0

    def fileno(self) -> int:
        return self._sock.fileno()

    def start(self, name: str, fds: Mapping[str, int], environment: Mapping[str, str]) -> int:
        """Start this process (launching.py); its pid. Raises OSError as fork and exec do."""
        without = [key for key in self._environment if key not in environment]
        more = {key: value for key, value in environment.items() if self._environment.get(key) != value}
        self._send({"start": name, "fds": dict(fds), "environment": more, "without": without})
        while True:
            answer = self._receive(0)
            match answer:
                case {"started": pid}:
                    return int(pid)
                case {"errno": number, "error": error}:
                    raise OSError(number, error)
                case dict():
                    self._said.append(answer)

    @property
    def has_exits(self) -> bool:
        """Whether some have been read already: then the channel need not be readable."""
        return bool(self._said)

    def exits(self) -> Iterator[Exit]:
        """Children that have ended. When the caller comes back, it has recorded that, and the child is reaped."""
        while (said := self._said.popleft() if self._said else self._receive(socket.MSG_DONTWAIT)) is not None:
            yield Exit(said["exited"], said["status"])
            self._send({"recorded": said["exited"]})

    def wait(self, timeout_s: float) -> None:
        """Until `exits` has something, but no longer."""
        if not self._said:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            poll.poll(timeout_s * 1000)

    def children(self) -> list[int]:
        """The children of root, without this process: all processes of the instance, and those that root reaps sooner
        or later.
        """
        return [pid for pid in process.children_of(self.root_pid) if pid != os.getpid()]

    def close_others(self, named: frozenset[int]) -> None:
        """Close every descriptor that is neither named nor root's: those that the supervisor before has left."""
        for fd in process.open_fds() - self._own_fds - named:
            os.close(fd)

    def pulse(self, now: float) -> None:
        """Call this regularly, or root ends this process."""
        if now >= self._pulse_s + _PULSE_S:
            self._pulse_s = now
            self._send({})

    def tell(self, *assignments: str) -> None:
        """The service manager (service_manager.py)."""
        self._send({"tell": assignments})

    def done(self, status: int) -> None:
        """The instance has ended, with this exit status."""
        self._send({"done": status})

    def become(self, python: str) -> None:
        """When this process has ended, root goes on in that interpreter, with the next supervisor."""
        self._send({"become": python})

    def has_taken_over(self) -> None:
        """This version can go on: if this process ends from now on, root stays what it is."""
        self._send({"has taken over": True})

    def _send(self, message: dict[str, Any]) -> None:
        self._sock.send(json.dumps(message).encode())

    def _receive(self, flags: int) -> dict[str, Any] | None:
        try:
            message: dict[str, Any] = json.loads(self._sock.recv(MOST_BYTES, flags))
        except BlockingIOError:
            return None
        return message
