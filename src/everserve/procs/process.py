"""Calls to the kernel: subreaper, parent-death signal, process name, open-file limit, process states, large blocks of
memory, and who is killed when memory is short.

The first three are Linux's prctl and do nothing elsewhere: children then notice the end of their parent by the end of
their control channel, which is slower and does not end a stopped process.
"""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Collection

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
LAST_LINES_S = 1.0  # for a process that shows what others have written, when all of these have ended
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK_BYTES = 1 << 18
_MOST_OPEN_FILES = 1 << 16
_OOM_STEP = 300  # of 1,000 in all; a step counts as much as 30 % of the memory that is short
_MOST_OOM_SCORE = 1000


def adopt_orphans() -> None:
    """From now on orphaned descendants become children of this process. Workers become root's children so."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies: even a stopped process does not outlive root."""
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def hear_of_end_of(parent_pid: int, signum: signal.Signals) -> None:
    """Have the kernel send this signal when the parent dies. Who does not handle it ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if sys.platform == "linux" and os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def raise_open_files() -> None:
    """Raise the open-file limit as far as allowed, for this process and its children.

    It limits two things: the descriptors of a process, and the descriptors that an unprivileged user may have in
    flight through sockets. 16 attention workers and 16 expert workers need 1,300 in flight while they load, and the
    default of many systems is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def return_large_blocks() -> None:
    """Have glibc map each large block of memory by itself: it grows in place, and is the kernel's again when freed.

    By default the first large block that is freed raises the size from which blocks are mapped, up to 32 MiB. Bodies of
    requests that grow side by side are then moved about in one heap, and leave holes that stay this process's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def die_sooner_than_parent() -> None:
    """When memory is short the kernel kills the process with the highest score. Root and the keeper have the score
    that they were started with, what can be replaced a step more, workers two: each inherits its parent's.

    A process may raise its score without any privilege, so the order holds also in a container, unless that starts at
    the top already.
    """
    path = f"/proc/{os.getpid()}/oom_score_adj"
    try:
        with open(path, "r+") as file:  # noqa: PTH123
            score = int(file.read())
            file.seek(0)
            file.write(str(min(score + _OOM_STEP, _MOST_OOM_SCORE)))
    except OSError:
        return  # not Linux, or /proc cannot be written: then size alone decides


def wait_for_ends(pids: Collection[int], within_s: float) -> None:
    """Until none of these runs, but no longer. They need not be children."""
    until_s = time.monotonic() + within_s
    while any(state_of(pid) not in (None, "Z", "X") for pid in pids) and time.monotonic() < until_s:
        time.sleep(0.005)


def kill(pid: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """If it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def how(status: int) -> str:
    """How a process with this exit status has ended."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"signal {-status}"


def set_name(name: str) -> None:
    """The name that ps and top show."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def state_of(pid: int) -> str | None:
    """The letter that ps shows (R runs, S sleeps, T stopped, Z dead); None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 (faster)
            return file.read().rsplit(b")", 1)[1].split()[0].decode()
    except (OSError, IndexError):
        return None


def cpu_s_of(pid: int) -> float:
    """Time of CPUs that this process has used; 0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 (faster)
            fields = file.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parent_of(pid: int) -> int | None:
    """The process that would be told of its end; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 (faster)
            return int(file.read().rsplit(b")", 1)[1].split()[1])
    except (OSError, IndexError):
        return None


def children_of(pid: int) -> list[int]:
    """The current children of this process."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def open_fds() -> frozenset[int]:
    """The open descriptors of this process, without the one that this takes."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (faster, and without pathlib's imports)
        try:
            os.fstat(int(name))
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            continue
        found.append(int(name))
    return frozenset(found)


def _prctl(option: int, argument: "int | ctypes.c_char_p") -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)
