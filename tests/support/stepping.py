"""Another process, stopped before and after each of its system calls, or after each instruction: ptrace(2).

A process that is killed before a system call has not made it, and one that is killed after it has not seen its result.
So these moments are all that the kernel can tell apart. All calls must come from one thread, the tracer.
"""

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_SINGLESTEP, _SYSCALL, _DETACH, _SEIZE, _INTERRUPT, _SYSCALL_INFO = 9, 24, 17, 0x4206, 0x4207, 0x420E
_SYSGOOD = 1  # a stop at a system call is told from any other one
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_WALL = 0x40000000
_INFO = struct.Struct("=B3xIQQQQ")  # op, architecture, two pointers; number and first argument, or the result
_INFO_BYTES = 88
_ENTRY, _EXIT = 1, 2
_NAMES = {
    "x86_64": {
        **{0: "read", 1: "write", 3: "close", 16: "ioctl", 20: "writev", 44: "sendto", 45: "recvfrom", 46: "sendmsg"},
        **{47: "recvmsg", 48: "shutdown", 54: "setsockopt", 55: "getsockopt", 72: "fcntl", 233: "epoll_ctl"},
        **{232: "epoll_wait", 281: "epoll_wait", 288: "accept", 9: "mmap", 10: "mprotect", 11: "munmap", 202: "futex"},
    },
    "aarch64": {
        **{63: "read", 64: "write", 57: "close", 29: "ioctl", 66: "writev", 206: "sendto", 207: "recvfrom"},
        **{211: "sendmsg", 212: "recvmsg", 210: "shutdown", 208: "setsockopt", 209: "getsockopt", 25: "fcntl"},
        **{21: "epoll_ctl", 22: "epoll_wait", 242: "accept", 222: "mmap", 226: "mprotect", 215: "munmap", 98: "futex"},
    },
}.get(platform.machine(), {})
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class Stop(NamedTuple):
    """Where the process stands: before a system call, or after it."""

    call: str
    is_before: bool
    fd: int  # the first argument, which is a descriptor in most calls


class CannotTrace(OSError):
    """This system does not let us."""


class Stepped:
    """One process; only its main thread is stopped."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._entered: Stop | None = None
        self._ptrace(_SEIZE, _SYSGOOD)
        self._ptrace(_INTERRUPT, 0)
        self._wait()

    def stops(self) -> Iterator[Stop]:
        """Each moment before or after a system call, while the process stands there."""
        passed = 0
        while True:
            self._ptrace(_SYSCALL, passed)
            status = self._wait()
            passed = 0
            if os.WSTOPSIG(status) == _SYSCALL_STOP:
                if (stop := self._where()) is not None:
                    yield stop
            elif status >> 16 == 0:
                passed = os.WSTOPSIG(status)  # a signal of its own

    def instructions(self) -> Iterator[None]:
        """After each instruction, until the process stops itself."""
        while True:
            self._ptrace(_SINGLESTEP, 0)
            if os.WSTOPSIG(self._wait()) != signal.SIGTRAP:
                return
            yield

    def kill(self) -> None:
        """Here and now. Its parent hears of it when this returns."""
        os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, _WALL)

    def let_go(self) -> None:
        self._ptrace(_DETACH, 0)

    def _where(self) -> Stop | None:
        info = ctypes.create_string_buffer(_INFO_BYTES)
        self._ptrace(_SYSCALL_INFO, ctypes.addressof(info), _INFO_BYTES)
        op, _, _, _, number, first = _INFO.unpack_from(info)
        if op == _ENTRY:
            self._entered = Stop(_NAMES.get(number, f"call {number}"), True, first & 0xFFFF_FFFF)
            return self._entered
        if op == _EXIT and self._entered is not None:
            return self._entered._replace(is_before=False)
        return None

    def _wait(self) -> int:
        _, status = os.waitpid(self.pid, _WALL)
        if not os.WIFSTOPPED(status):
            raise ChildProcessError(f"process {self.pid} has ended by itself")
        return status

    def _ptrace(self, request: int, data: int, address: int = 0) -> None:
        if _libc.ptrace(request, self.pid, address, data) < 0:
            error = ctypes.get_errno()
            raise CannotTrace(error, f"ptrace: {os.strerror(error)}")
