"""Where an instance keeps what outlives its processes, and that no other instance uses it.

The directory has a file `instance.lock`, which the instance holds: the kernel frees it with the process. A temporary
directory goes when the instance stops. One whose instance was killed is removed by the next instance of the same user.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from everserve.errors import ConfigError
from everserve.procs.process_table import StateRow

_PREFIX = "everserve-state-"
_LOCK = "instance.lock"


@dataclass(frozen=True)
class StateDirectory:
    """`lock`: the descriptor that holds it, also when the supervisor that has opened it dies."""

    path: Path
    lock: int
    is_temporary: bool

    @classmethod
    def open(cls, given: Path | None) -> "StateDirectory":
        """The directory that was asked for, or a temporary one."""
        if given is not None:
            lock = _take(given)
            if lock is None:
                raise ConfigError(f"--state-dir {given}: another instance uses it")
            return cls(given, lock, is_temporary=False)
        _remove_left_ones(Path(tempfile.gettempdir()))
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = _take(directory)
        assert lock is not None, "a directory that was just made"
        return cls(directory, lock, is_temporary=True)

    def row(self) -> StateRow:
        """What the process table has of it."""
        return StateRow(path=str(self.path), lock=self.lock, is_temporary=self.is_temporary)

    @classmethod
    def of_row(cls, row: StateRow) -> "StateDirectory":
        return cls(Path(row.path), row.lock, row.is_temporary)

    def close(self) -> None:
        """The instance has ended."""
        if self.is_temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _take(directory: Path) -> int | None:
    """A descriptor that holds the lock; None: another process has it."""
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _remove_left_ones(parent: Path) -> None:
    """A directory without a lock file is being made; one whose lock is free has no instance any more."""
    for directory in parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid() or not (directory / _LOCK).exists():
                continue
            lock = _take(directory)
            if lock is not None:
                with os.fdopen(lock):
                    shutil.rmtree(directory, ignore_errors=True)
