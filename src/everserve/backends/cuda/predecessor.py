"""The process that used this KV pool on the device before: wait until none of its work can write there any more.

A successor in a seat gets its predecessor's pool as its own (`--kv-log anchor`) as soon as the kernel has marked the
life word. That is early in a death: the step that was queued on the device may still run, and store KV into blocks
that the successor has given to other streams. No check would detect that: words are computed from what is in the pool.

    life word marked ──> the process releases the device ──> the process has exited ──> quiet_s ──> the pool is ours

Queued work outlives its process: it runs while the supervisor still holds the process's descriptors
(procs/device_descriptors.py), and is over when the supervisor closes them. It is one step at most: a second is plenty.

The pid of the pool's owner is in the first line of its log, where the header leaves room, with its time of birth and a
check of both. If they do not fit, it is not known which process that was, and the wait is as long as any may need. The
wait runs in parallel with the successor's own start. If the successor was a spare, this wait is the longest part of its
start.

Streams that other workers take over need none of this: their KV is checked after it was copied.
"""

import ctypes
import logging
import os
import threading
import time
import zlib
from pathlib import Path
from struct import Struct

from everserve.errors import EverserveError
from everserve.kvlog.layout import HEADER
from everserve.kvlog.log import Log
from everserve.procs.device_descriptors import CLOSE_AFTER_S

log = logging.getLogger(__name__)

CHECK_AT, PID_AT, BORN_AT = 40, 48, 56
assert HEADER.size <= CHECK_AT and BORN_AT + 8 <= 64, "the header's line has room for them"
_both, _WORD = Struct("<QQ"), (1 << 64) - 1
_QUIET_S = 2 * CLOSE_AFTER_S
_UNKNOWN_S = 10.0  # for a process that had its life word marked before ours was started to exit
_GIVE_UP_S = 30.0  # a killed process, or one that the supervisor kills after it was declared gone, exits long before
_LOOK_EVERY_S = 0.005


class PredecessorStays(EverserveError):
    """This worker cannot start. The next one tries again."""


class Ended:
    """A process that had a pool before, as the pool's memory says: all 0 if there was none. A thread watches it from
    now on."""

    def __init__(
        self, pid: int, born: int, check: int, quiet_s: float = _QUIET_S, unknown_s: float = _UNKNOWN_S
    ) -> None:
        self._pid, self._born = pid, born
        self._is_over = threading.Event()
        if not (pid or born or check):
            self._is_over.set()
            return
        if check != check_of(pid, born):
            log.warning("it cannot be read which process had this KV pool before: waiting %g s", unknown_s)
            self._pid, quiet_s = 0, unknown_s
        threading.Thread(target=self._see_off, args=(quiet_s,), name="predecessor", daemon=True).start()

    def wait(self, timeout_s: float = _GIVE_UP_S) -> None:
        """Until its process has exited and its queued work is over."""
        if not self._is_over.wait(timeout_s):
            raise PredecessorStays(f"process {self._pid}, which had this KV pool before, has not ended")

    def _see_off(self, quiet_s: float) -> None:
        while self._pid and born_at(self._pid) == self._born:  # a zombie too: some of its threads may still run
            time.sleep(_LOOK_EVERY_S)
        time.sleep(quiet_s)
        self._is_over.set()


class Predecessor(Ended):
    """The previous owner of this log's pool."""

    def __init__(self, log: Log, quiet_s: float = _QUIET_S, unknown_s: float = _UNKNOWN_S) -> None:
        pid, born, check = (_word(log, at).value for at in (PID_AT, BORN_AT, CHECK_AT))
        super().__init__(pid, born, check, quiet_s, unknown_s)


def own(log: Log, pid: int | None = None) -> None:
    """This process writes into the pool from now on."""
    pid = os.getpid() if pid is None else pid
    born = born_at(pid) or 0
    _word(log, PID_AT).value, _word(log, BORN_AT).value = pid, born
    _word(log, CHECK_AT).value = check_of(pid, born)


def check_of(pid: int, born: int) -> int:
    """Never 0."""
    return zlib.crc32(_both.pack(pid & _WORD, born & _WORD)) + 1


def _word(log: Log, at: int) -> ctypes.c_int64:
    assert not log.closed
    return ctypes.c_int64.from_address(log.layout.base + at)


def born_at(pid: int) -> int | None:
    """Start time in ticks since boot: it tells apart processes that reuse a pid. None if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[19])
    except (OSError, IndexError):
        return None
