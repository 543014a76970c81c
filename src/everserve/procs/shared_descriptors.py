"""A child that shares its parent's table of descriptors: what either opens, both have; what either closes, both lose.

When such a child dies, nothing that it had open is closed: its connections stay, under the same numbers, and the parent
makes a successor that finds all of them. No message passes a descriptor on, so there is no moment at which one could be
lost.

    os.fork()               a copy of the table: what the child opens later is closed by its death
    clone(CLONE_FILES)      one table, which lives as long as one of the processes that use it

Linux only; elsewhere, or where a sandbox refuses the call, `can_share_descriptors` says no. The caller must have one
thread: the C library's own fork handlers are not run. An `exec` gives the process that calls it a copy of the table.
"""

import ctypes
import errno
import os
import platform
import signal
import sys
from pathlib import Path

CLONE_FILES = 0x400
CLONE_PARENT = 0x8000  # the child is a sibling: its parent is the caller's parent
_CLONE_CHILD_CLEARTID = 0x200000
_CLONE_CHILD_SETTID = 0x1000000
_CALL_NUMBERS = {"x86_64": 56, "aarch64": 220}
_PR_GET_TID_ADDRESS = 40


def clone(flags: int) -> int:
    """os.fork with these flags of clone(2): 0 in the child, the child's pid in the parent. Raises OSError."""
    assert num_threads() == 1, "a child would have none of the other threads, and all of their locks"
    python, kernel = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)  # which keep the interpreter's lock
    number = _CALL_NUMBERS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        raise OSError(errno.ENOSYS, "this system has no clone(2) that is known here")
    kernel.syscall.restype = ctypes.c_long
    child_tid = _tid_address(kernel)
    if child_tid:  # where the C library remembers the thread's id, as its own fork does it
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    last = (child_tid, 0) if platform.machine() == "x86_64" else (0, child_tid)  # two arguments have changed places
    arguments = [ctypes.c_ulong(number) for number in (flags | signal.SIGCHLD, 0, 0, *last)]
    python.PyOS_BeforeFork()
    pid = int(kernel.syscall(ctypes.c_long(number), *arguments))
    error = ctypes.get_errno()
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, os.strerror(error))
    return pid


def can_share_descriptors() -> bool:
    """Whether `clone(CLONE_FILES)` works here: tried with a child that ends at once."""
    try:
        pid = clone(CLONE_FILES)
    except OSError:
        return False
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


def num_threads() -> int:
    """The number of threads of this process; 1 if the system does not say."""
    try:
        return len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return 1


def _tid_address(kernel: ctypes.PyDLL) -> int:
    """Where the C library keeps the id of this thread; 0 if the kernel does not say."""
    address = ctypes.c_void_p()
    pointer = ctypes.cast(ctypes.byref(address), ctypes.c_void_p).value
    zero = ctypes.c_ulong(0)
    if kernel.prctl(_PR_GET_TID_ADDRESS, ctypes.c_ulong(pointer or 0), zero, zero, zero):
        return 0
    return address.value or 0
