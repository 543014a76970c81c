"""Events in files: `DIR/<process>.jsonl`, to which every incarnation of a process appends.

    supervisor.jsonl, gateway.jsonl, orchestrator.jsonl, worker-0.jsonl ...     written now
    worker-0.1795041215540120.jsonl ...                                         full, by the microsecond of its end

A file that is full is renamed, and the oldest of these are deleted, so that all files together stay within
`--event-log-bytes`: a file is full at 1/128 of that, and at most 67 processes write at the same time. Two incarnations
may write to one file, or to one that the other has just renamed: a line is one write to a file opened for appending, so
lines stay whole.

The files contain client-chosen ids, with which streams can be resumed, so only their owner can read them.
"""

import contextlib
import io
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from everserve.config.events import EventLogConfig
from everserve.wire.events import AnyEvent

log = logging.getLogger(__name__)

_PARTS = 128  # nearly twice as many as processes that write
_SUFFIX = ".jsonl"
_IS_FULL = re.compile(r"\.\d{16}\.jsonl$")


class EventLog:
    """Where one process writes its events: its file, if configured, and the `tell` callback."""

    def __init__(
        self, process: str, config: EventLogConfig | None = None, tell: Callable[[AnyEvent], None] | None = None
    ) -> None:
        self.process = process
        self._tell = tell
        self._file = _open(process, config) if config is not None and config.directory is not None else None

    @property
    def num_lost(self) -> int:
        """Events that could not be written."""
        return self._file.num_lost if self._file is not None else 0

    def append(self, event: AnyEvent) -> None:
        """Record an event of this process, or forward one of another process. A full disk only loses the record."""
        if not event.unix_s:
            event = self._stamped(event)
        if self._file is not None and event.process == self.process:
            self._file.append(msgspec.json.encode(event) + b"\n")
        if self._tell is not None:
            self._tell(event)

    def _stamped(self, event: AnyEvent) -> AnyEvent:
        """It has just happened, in this process."""
        return msgspec.structs.replace(
            event,
            at_s=event.at_s or time.monotonic(),
            unix_s=time.time(),
            process=event.process or self.process,
            pid=os.getpid(),
        )


class _Lines:
    """The file that is written now."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.num_lost = 0
        self._path = path
        self._max_bytes = max_bytes  # of all files; 0: no limit
        self._part_bytes = max_bytes // _PARTS
        self._is_torn = False  # the last line is half a line
        self._file = self._open()
        self._make_room()

    def append(self, line: bytes) -> None:
        line = b"\n" + line if self._is_torn else line
        try:
            num_written = self._file.write(line)
        except OSError as error:
            num_written, reason = 0, error.strerror
        else:
            reason = "no space left"
        if num_written != len(line):
            self._is_torn |= num_written > 0
            self.num_lost += 1
            if self.num_lost == 1:
                log.warning("events cannot be written to %s: %s", self._path, reason)
            return
        self._is_torn = False
        if self._part_bytes and os.fstat(self._file.fileno()).st_size >= self._part_bytes:
            self._begin_another()

    def _begin_another(self) -> None:
        """Unless another incarnation has done so, or the file was removed: then it is only opened anew. If that fails,
        this one grows on."""
        with contextlib.suppress(OSError):
            if self._is_at_its_path():
                full = f"{self._path.stem}.{time.time_ns() // 1000:016d}{_SUFFIX}"
                self._path.rename(self._path.with_name(full))
            before, self._file = self._file, self._open()
            before.close()
            self._make_room()

    def _is_at_its_path(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _open(self) -> io.FileIO:
        fd = _open_private(self._path)
        size = os.fstat(fd).st_size
        self._is_torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # by another incarnation, perhaps now
        return io.FileIO(fd, "ab")

    def _make_room(self) -> None:
        """Delete the oldest full files, as if each that is written now were full."""
        if not self._max_bytes:
            return
        files = list(self._path.parent.glob(f"*{_SUFFIX}"))
        full = sorted((path for path in files if _IS_FULL.search(path.name)), key=lambda path: path.name[-22:])
        room = self._max_bytes - (len(files) - len(full)) * self._part_bytes
        for path in reversed(full):
            with contextlib.suppress(OSError):  # another process deletes, too
                room -= path.stat().st_size
                if room < 0:
                    path.unlink()


def _open(process: str, config: EventLogConfig) -> _Lines | None:
    path = Path(config.directory or "") / f"{process}{_SUFFIX}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _Lines(path, config.max_bytes)
    except OSError as error:
        log.warning("events are not written: %s: %s", path, error.strerror)
        return None


def _open_private(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)  # the file may have existed
    except OSError:
        os.close(fd)
        raise
    return fd
