"""The logs of other attention workers, kept in advance: a stream that loses its worker may continue here.

A log that cannot be read is no log: its streams are computed again. That is told once and counted.

Only names are kept. Memory is opened when a stream needs it, and unmapped when none waits to be restored from it.
On a device, where mapping takes longer, it is mapped after the step in which it was offered, and unmapped when it is
withdrawn, too.
"""

import logging
import os
from collections.abc import Callable

from everserve.engine.engine import Engine
from everserve.engine.saved import Saved
from everserve.kvlog.chains import key_of
from everserve.kvlog.log import Log, LogMismatch
from everserve.memory.local import LocalMemory
from everserve.tables.ids import Rank, WorkerId
from everserve.tables.memory import Kind, MemoryName
from everserve.tables.requests import RequestSpec

log = logging.getLogger(__name__)

# (fd of the log, fd of its blocks) -> the log, or None if it cannot be reached here. The caller keeps the descriptors.
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
        self.memory = LocalMemory()  # of others
        self.num_unreadable = int(own is not None and own.was_unreadable)
        self._open_log = open_log  # None: logs are off
        self._own = own
        self._opens_early = opens_early
        self._logs: dict[WorkerId, MemoryName] = {}
        self._open: dict[WorkerId, Log | None] = {}
        self._shares_blocks_with = shares_blocks_with
        self._to_spare: list[WorkerId] = []  # logs whose blocks should be used last
        self._left: list[Log] = []  # left, but a stream may still wait to be restored from one

    @property
    def ids(self) -> list[WorkerId]:
        return sorted(self._logs)

    def offer(self, memory: MemoryName) -> None:
        """A log can be opened, or its blocks, if these are in separate memory: they are there before the log."""
        if memory.kind is Kind.LOG:
            (id,) = memory.owners
            self._to_spare += [id] if id.rank == self._shares_blocks_with and id not in self._logs else []
            self._logs[id] = memory

    def withdraw(self, memory: MemoryName, engine: Engine) -> None:
        """The log is not needed any more. The next `sweep` unmaps it: a device may be in the middle of a step."""
        if memory.kind is not Kind.LOG:
            return
        (id,) = memory.owners
        if self._logs.pop(id, None) is not None and self._is_own(memory):
            engine.forget_adopted()
        opened = self._open.pop(id, None)
        if opened is not None:
            self._left.append(opened)

    def find(self, spec: RequestSpec, source: WorkerId) -> Saved | None:
        """The saved state of this stream in that log, if any."""
        opened = self._log(source)
        record = opened.find(key_of(spec.id)) if opened is not None else None
        return Saved.of(opened, record, self._own) if opened is not None and record is not None else None

    def sweep(self, engine: Engine) -> None:
        """Unmap logs that are not needed any more, map new ones in advance. Call it between steps."""
        for id in self._to_spare:
            opened = self._log(id)
            records = opened.records() if opened is not None else ()
            engine.spare(block for record in records for block in record.blocks)
        self._to_spare.clear()
        if not self._opens_early:
            self._set_aside()
        for opened in [opened for opened in self._left if not engine.waits_for(opened)]:
            self._left.remove(opened)
            opened.close()
        if self._opens_early and len(self._open) < len(self._logs):
            for id in self._logs:
                self._log(id)

    def _set_aside(self) -> None:
        """What a stream needed of a log it has found by now. Also a living worker's stream may come here, for example
        after the gateway died, and its log is not left for hours."""
        self._left += [opened for opened in self._open.values() if opened is not None]
        self._open = {id: opened for id, opened in self._open.items() if opened is None}

    def _log(self, source: WorkerId) -> Log | None:
        if source not in self._open and source in self._logs and self._open_log is not None:
            memory = self._logs[source]
            blocks = self.memory.beside(memory, Kind.KV)
            try:
                self._open[source] = self._open_log(
                    self.memory.descriptor(memory), self.memory.descriptor(blocks) if blocks is not None else None
                )
            except (LogMismatch, OSError) as error:
                self._open[source] = None
                self.num_unreadable += 1
                log.warning(
                    "the KV log of worker %d (incarnation %d) cannot be read, so its streams are computed again: %s",
                    source.rank, source.incarnation, error,
                )  # fmt: skip
        return self._open.get(source)

    def _is_own(self, memory: MemoryName) -> bool:
        """Whether we go on with that log."""
        found = os.fstat(self.memory.descriptor(memory))
        return self._own is not None and self._own.identity == (found.st_dev, found.st_ino)


def close_fds(fd: int, kv_fd: int | None) -> None:
    """Close the descriptor of a log, and that of its blocks if there is one."""
    os.close(fd)
    if kv_fd is not None:
        os.close(kv_fd)
