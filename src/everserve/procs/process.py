"""Calls to the kernel: subreaper, parent-death signal, process name, open-file limit, process states.

The first three are Linux's prctl and do nothing elsewhere: children then notice the end of their parent by the end of
their control channel, which is slower and does not end a stopped process.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_MOST_OPEN_FILES = 1 << 16


def adopt_orphans() -> None:
    """From now on orphaned descendants become children of this process. Workers become the supervisor's children so."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies: even a stopped child does not outlive its supervisor."""
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


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


def children_of(pid: int) -> list[int]:
    """The current children of this process."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def _prctl(option: int, argument: "int | ctypes.c_char_p") -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)
