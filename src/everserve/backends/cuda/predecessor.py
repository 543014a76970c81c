"""Whoever had this KV pool before us, on a device: until nothing of it can write there any more.

A successor in a seat gets its predecessor's pool as its own (`--kv-log anchor`) as soon as the kernel has marked the
life word. That is early in a death: the step that was queued on the device may still run, and store KV into blocks
which the successor has given to other streams. Nobody would notice: words are made of what is in the pool.

    life word marked ──> the process lets go of the device ──> it is gone ──> quiet_s ──> the pool is ours

When a process is gone, its work is not: what was queued is done while the supervisor still holds its descriptors
(procs/device_descriptors.py), and is over when it lets them go. It is one step at most: a second is plenty.

Who has the pool stands in the first line of its log, where the header leaves room. All of the waiting is done beside
the successor's own start; if that was a spare, it is what takes longest.

Streams that others take over need none of this: what they copy is checked after it has arrived.
"""

import ctypes
import os
import threading
import time
from pathlib import Path

from everserve.errors import EverserveError
from everserve.kvlog.layout import HEADER
from everserve.kvlog.log import Log
from everserve.procs.device_descriptors import PARTING_S

PID_AT, BORN_AT = 48, 56
assert HEADER.size <= PID_AT and BORN_AT + 8 <= 64, "the header's line has room for both"
_QUIET_S = 2 * PARTING_S
_GIVE_UP_S = 30.0  # a process that was killed, or is killed for not hearing that it is gone, is gone long before
_LOOK_EVERY_S = 0.005


class PredecessorStays(EverserveError):
    """This worker cannot start. The next one tries again."""


class Predecessor:
    """Of whoever adopts this log. Watched from now on, in a thread."""

    def __init__(self, log: Log, quiet_s: float = _QUIET_S) -> None:
        self._pid, self._born = _word(log, PID_AT).value, _word(log, BORN_AT).value
        self._is_over = threading.Event()
        if not self._pid:
            self._is_over.set()
            return
        threading.Thread(target=self._see_off, args=(quiet_s,), name="predecessor", daemon=True).start()

    def wait(self, timeout_s: float = _GIVE_UP_S) -> None:
        """Until nothing of it is left."""
        if not self._is_over.wait(timeout_s):
            raise PredecessorStays(f"process {self._pid}, which had this KV pool before, has not ended")

    def _see_off(self, quiet_s: float) -> None:
        while _born_at(self._pid) == self._born:  # a dead one that nobody has waited for may have threads that are not
            time.sleep(_LOOK_EVERY_S)
        time.sleep(quiet_s)
        self._is_over.set()


def own(log: Log, pid: int | None = None) -> None:
    """This process writes into the pool from now on. The pid comes last: half of this is nobody."""
    pid = os.getpid() if pid is None else pid
    _word(log, PID_AT).value = 0
    _word(log, BORN_AT).value = _born_at(pid) or 0
    _word(log, PID_AT).value = pid


def _word(log: Log, at: int) -> ctypes.c_int64:
    assert not log.closed
    return ctypes.c_int64.from_address(log.layout.base + at)


def _born_at(pid: int) -> int | None:
    """In ticks since the machine started: who has this pid later is somebody else. None if nobody has."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[19])
    except (OSError, IndexError):
        return None
