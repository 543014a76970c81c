"""Copy weights at memory speed, and sum them up in the same pass.

The pace. A copy runs in chunks of 256 KiB on a thread of its own. After each chunk the thread yields its core, and
rests for `rest_percent` of the time that the chunk took. The thread has a low priority (`be_nice`): where every core is
busy with steps, a fill gets about a tenth of one core and a backup a seventieth; where cores are idle, which they are
while streams wait for a lost expert, a fill runs at memory speed.
"""

import ctypes
import functools
import os
import threading

from everserve.native import BuildError, library

FILL_NICE, BACKUP_NICE = 10, 19
BACKUP_REST_PERCENT = 100


@functools.cache
def load() -> ctypes.CDLL:
    """Compiled on first use. A call gives up the interpreter's lock."""
    try:
        lib = ctypes.CDLL(str(library("weights")))
    except OSError as e:
        raise BuildError(f"cannot load the library that copies weights: {e}") from e
    pointer, int64, uint64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
    lib.es_weights_copy.argtypes, lib.es_weights_copy.restype = [pointer, pointer, int64, uint64, int64], uint64
    return lib


def copy(to: int, source: int, num_bytes: int, *, first_word: int = 0, rest_percent: int = 0) -> int:
    """From one address to another. Returns the checksum of what is there then, as a part of an expert that begins at
    this word."""
    return int(load().es_weights_copy(to, source, num_bytes, first_word, rest_percent))


def sum_at(address: int, num_bytes: int) -> int:
    """The checksum of what is there."""
    return int(load().es_weights_copy(address, None, num_bytes, 0, 0))


def be_nice(nice: int) -> None:
    """Lower the priority of the calling thread, for good."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
