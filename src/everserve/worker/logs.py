"""The logs of other attention workers, kept from the beginning: a stream that loses its worker may come to us.

Only descriptors are kept; memory is mapped when the first stream needs it (on a device, where that takes longer, at the
end of the step in which we hear of it), and unmapped when the orchestrator says that nobody needs it and no stream here
still waits to be restored from it.
"""

import os
from collections.abc import Callable

from everserve.engine.engine import Engine
from everserve.engine.saved import Saved
from everserve.kvlog.chains import key_of
from everserve.kvlog.log import Log
from everserve.tables.ids import WorkerId
from everserve.tables.requests import RequestSpec

# Of descriptors, which stay the caller's: the log's, and its blocks'. None: it cannot be read here.
OpenLog = Callable[[int, int | None], Log | None]


class KeptLogs:
    """By the incarnation that wrote them."""

    def __init__(self, open_log: OpenLog | None, own: Log | None, opens_early: bool = False) -> None:
        self._open_log = open_log  # None: logs are off
        self._own = own
        self._opens_early = opens_early
        self._fds: dict[WorkerId, tuple[int, int | None]] = {}
        self._open: dict[WorkerId, Log | None] = {}
        self._left: list[Log] = []  # nobody needs them, but a stream may still wait with one in its hands

    @property
    def ids(self) -> list[WorkerId]:
        return sorted(self._fds)

    def join(self, id: WorkerId, fd: int, kv_fd: int | None = None) -> None:
        """The descriptors are ours from now on. kv_fd: of its blocks, if these are in memory of their own."""
        if id in self._fds:
            close_fds(fd, kv_fd)
        else:
            self._fds[id] = fd, kv_fd

    def leave(self, id: WorkerId, engine: Engine) -> None:
        """Nobody needs it. It is unmapped with the next `sweep`: a device may be in the middle of a step."""
        fds = self._fds.pop(id, None)
        if fds is not None:
            memory = os.fstat(fds[0])
            if self._own is not None and self._own.identity == (memory.st_dev, memory.st_ino):
                engine.forget_adopted()
            close_fds(*fds)
        opened = self._open.pop(id, None)
        if opened is not None:
            self._left.append(opened)

    def find(self, spec: RequestSpec, source: WorkerId) -> Saved | None:
        """What that log has of this stream, if anything."""
        log = self._log(source)
        record = log.find(key_of(spec.id)) if log is not None else None
        return Saved.of(log, record, self._own) if log is not None and record is not None else None

    def sweep(self, engine: Engine) -> None:
        """Unmap what nobody needs any more, map what somebody may need soon. Between steps."""
        for log in [log for log in self._left if not engine.waits_for(log)]:
            self._left.remove(log)
            log.close()
        if self._opens_early and len(self._open) < len(self._fds):
            for id in self._fds:
                self._log(id)

    def _log(self, source: WorkerId) -> Log | None:
        if source not in self._open and source in self._fds and self._open_log is not None:
            self._open[source] = self._open_log(*self._fds[source])
        return self._open.get(source)


def close_fds(fd: int, kv_fd: int | None) -> None:
    """Of a log, and of its blocks if these have one."""
    os.close(fd)
    if kv_fd is not None:
        os.close(kv_fd)
