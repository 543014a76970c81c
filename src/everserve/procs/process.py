"""What a process asks of its kernel: whose child it is, what ends it, what it is called.

All of it is Linux's prctl. Elsewhere these calls do nothing: children then notice the end of their parent by the end of
their control channel, which is slower and does not reach a stopped process.
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
    """From now on, processes whose parent ends become our children. Forked workers come to the supervisor this way."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent_pid: int) -> None:
    """SIGKILL for us when this process, our parent, is gone: even a stopped child does not outlive its supervisor."""
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it was gone before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def raise_open_files() -> None:
    """As many open files as we may have, for us and our children.

    The limit is two limits: how many descriptors a process has, and how many a user without privileges may have on
    their way through sockets. 16 attention workers and 16 expert workers need 1,300 on their way while they load, and
    many systems begin with 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def set_name(name: str) -> None:
    """What ps and top show."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def state_of(pid: int) -> str | None:
    """The letter that ps shows (R runs, S sleeps, T stopped, Z dead); None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 (bytes, once, in a hurry)
            return file.read().rsplit(b")", 1)[1].split()[0].decode()
    except (OSError, IndexError):
        return None


def children_of(pid: int) -> list[int]:
    """The children that this process has now."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def _prctl(option: int, argument: "int | ctypes.c_char_p") -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)
