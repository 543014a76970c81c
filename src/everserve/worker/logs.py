"""The logs of other attention workers, kept from the beginning: a stream that loses its worker may come to us.

Only the descriptor is kept; memory is mapped when the first stream needs it, and unmapped when the orchestrator says
that nobody needs it and no stream here still waits to be restored from it.
"""

import os

from everserve.engine.engine import Engine
from everserve.engine.saved import Saved
from everserve.kvlog.chains import key_of
from everserve.kvlog.layout import LogShape
from everserve.kvlog.log import Log
from everserve.tables.ids import LogId
from everserve.tables.requests import RequestSpec


class KeptLogs:
    """By the incarnation that wrote them."""

    def __init__(self, shape: LogShape | None, own: Log | None) -> None:
        self._shape = shape  # None: logs are off
        self._own = own
        self._fds: dict[LogId, int] = {}
        self._open: dict[LogId, Log] = {}
        self._left: list[Log] = []  # nobody needs them, but a stream may still wait with one in its hands

    @property
    def ids(self) -> list[LogId]:
        return sorted(self._fds)

    def join(self, id: LogId, fd: int) -> None:
        """The descriptor is ours from now on."""
        if id in self._fds:
            os.close(fd)
        else:
            self._fds[id] = fd

    def leave(self, id: LogId, engine: Engine) -> None:
        fd = self._fds.pop(id, None)
        if fd is not None:
            memory = os.fstat(fd)
            if self._own is not None and self._own.identity == (memory.st_dev, memory.st_ino):
                engine.forget_adopted()
            os.close(fd)
        opened = self._open.pop(id, None)
        if opened is not None:
            self._left.append(opened)
        self.sweep(engine)

    def find(self, spec: RequestSpec, source: LogId) -> Saved | None:
        """What that log has of this stream, if anything."""
        log = self._log(source)
        record = log.find(key_of(spec.id)) if log is not None else None
        return Saved.of(log, record, self._own) if log is not None and record is not None else None

    def sweep(self, engine: Engine) -> None:
        """Unmap what nobody needs any more."""
        for log in [log for log in self._left if not engine.waits_for(log)]:
            self._left.remove(log)
            log.close()

    def _log(self, source: LogId) -> Log | None:
        if source not in self._open and source in self._fds and self._shape is not None:
            self._open[source] = Log(self._fds[source], self._shape)
        return self._open.get(source)
