"""The logs of other attention workers, kept in advance: a stream that loses its worker may continue here.

Only descriptors are kept. Memory is mapped when the first stream needs it (on a device, where that takes longer, after
the step in which the descriptor arrived), and unmapped when the orchestrator has sent LogLeft and no stream here still
waits to be restored from it.
"""

import os
from collections.abc import Callable

from everserve.engine.engine import Engine
from everserve.engine.saved import Saved
from everserve.kvlog.chains import key_of
from everserve.kvlog.log import Log
from everserve.tables.ids import Rank, WorkerId
from everserve.tables.requests import RequestSpec

# (fd of the log, fd of its blocks) -> the log, or None if it cannot be read here. The caller keeps the descriptors.
OpenLog = Callable[[int, int | None], Log | None]


class KeptLogs:
    """Logs by the incarnation that wrote them. `shares_blocks_with`: a rank whose logs name blocks of our own range, in
    pools that others keep."""

    def __init__(
        self,
        open_log: OpenLog | None,
        own: Log | None,
        opens_early: bool = False,
        shares_blocks_with: Rank | None = None,
    ) -> None:
        self._open_log = open_log  # None: logs are off
        self._own = own
        self._opens_early = opens_early
        self._fds: dict[WorkerId, tuple[int, int | None]] = {}
        self._open: dict[WorkerId, Log | None] = {}
        self._shares_blocks_with = shares_blocks_with
        self._to_spare: list[WorkerId] = []  # logs whose blocks should be used last
        self._left: list[Log] = []  # left, but a stream may still wait to be restored from one

    @property
    def ids(self) -> list[WorkerId]:
        return sorted(self._fds)

    def join(self, id: WorkerId, fd: int, kv_fd: int | None = None) -> None:
        """Takes ownership of the descriptors. kv_fd: of its blocks, if these are in separate memory."""
        if id in self._fds:
            close_fds(fd, kv_fd)
        else:
            self._fds[id] = fd, kv_fd
            self._to_spare += [id] if id.rank == self._shares_blocks_with else []

    def leave(self, id: WorkerId, engine: Engine) -> None:
        """The log is not needed any more. The next `sweep` unmaps it: a device may be in the middle of a step."""
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
        """The saved state of this stream in that log, if any."""
        log = self._log(source)
        record = log.find(key_of(spec.id)) if log is not None else None
        return Saved.of(log, record, self._own) if log is not None and record is not None else None

    def sweep(self, engine: Engine) -> None:
        """Unmap logs that are not needed any more, map new ones in advance. Call it between steps."""
        for id in self._to_spare:
            log = self._log(id)
            engine.spare(block for record in (log.records() if log is not None else ()) for block in record.blocks)
        self._to_spare.clear()
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
    """Close the descriptor of a log, and that of its blocks if there is one."""
    os.close(fd)
    if kv_fd is not None:
        os.close(kv_fd)
