"""Processes that work on what clients send, within limits (limited_process.py says which, and what the frames are).

    ChatTemplates.render, Grammars.check --> LimitedProcesses.ask --frames--> limited_process.py

There is one process. When an answer has taken a tenth of a second and no other process is idle, one more is started for
the next; there are four at most, of which long work gets three. A process that goes beyond its limits ends, and is
replaced.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from typing import Any

import msgspec

from everserve.errors import OverloadedError
from everserve.gateway.text.limited_process import LENGTH, OK

CPU_S = 5.0  # of one answer
_MEMORY_BYTES = 1 << 30  # a few times the largest body, and what a template makes of it
_WALL_S = 120.0  # for a process that was stopped: one that computes ends much earlier
_MOST, _MOST_IDLE = 4, 2  # processes
_LONG_S = 0.1
_LONG_WORK = 1 << 13  # bytes
_PASSED_ON = ("PYTHON", "LANG", "LC_", "LD_", "PATH", "TZ")  # of the environment: what works there need not see keys


class LimitedProcesses:
    """Processes for one task."""

    def __init__(self, task: str, what: str, start: dict[str, Any], cpu_s: float, prepare_s: float) -> None:
        """`what` the processes do, for error messages. `start`: their first frame, with the CPU time of their answers
        to it and to others."""
        self.task = task
        self.cpu_s = cpu_s
        self._what = what
        self._start = msgspec.json.encode(
            start | {"cpu_s": cpu_s, "prepare_s": prepare_s, "memory_bytes": _MEMORY_BYTES}
        )
        self._idle: list[LimitedProcess] = []
        self._waiting: deque[asyncio.Future[LimitedProcess]] = deque()
        self._num = 0  # processes, idle or not
        self._long = asyncio.Semaphore(_MOST - 1)

    def prepare(self) -> None:
        """Start a process, which gets ready beside what the gateway does next."""
        self._idle.append(self._new())

    async def begin(self) -> bytes:
        """What a process says of the first frame."""
        return await self._ask(None)

    async def ask(self, frame: bytes) -> bytes:
        """The answer; of processes that could not get ready what they say of the first frame. Raises ProcessDied if
        the work ends its process."""
        async with self._long if len(frame) > _LONG_WORK else contextlib.nullcontext():
            return await self._ask_twice(frame)

    def why(self, died: "ProcessDied") -> str:
        """The cause in words, behind what was worked on."""
        if died.status == -signal.SIGPROF:
            return f"takes more than {self.cpu_s:g} s of CPU time"
        return f"ends its process ({died})"

    async def _ask_twice(self, frame: bytes) -> bytes:
        """A process that was killed from outside, perhaps long ago, says nothing about this work."""
        try:
            return await self._ask(frame)
        except ProcessDied as died:
            if died.status != -signal.SIGKILL:
                raise
        try:
            return await self._ask(frame)
        except ProcessDied as died:
            if died.status != -signal.SIGKILL:
                raise
            raise OverloadedError(f"The process that {self._what} was killed.") from died

    async def _ask(self, frame: bytes | None) -> bytes:
        """The answer to this frame; if there is none, or it cannot come to that, to the first one."""
        process = await self._take()
        try:
            async with asyncio.timeout(_WALL_S):
                if not process.is_prepared:
                    answer = await process.ask(self._start)
                    process.is_prepared = answer == OK
                    if not process.is_prepared:
                        process.end()
                    if frame is None or not process.is_prepared:
                        return answer
                assert frame is not None, "it begins once, before it is asked"
                alarm = asyncio.get_running_loop().call_later(_LONG_S, self._start_another)
                try:
                    return await process.ask(frame)
                finally:
                    alarm.cancel()
        except TimeoutError as error:
            process.end()
            raise OverloadedError(f"The process that {self._what} did not answer.") from error
        except BaseException:  # half an answer may be on its way
            process.end()
            raise
        finally:
            self._give_back(process)

    async def _take(self) -> "LimitedProcess":
        while self._idle:
            if (process := self._idle.pop()).is_alive():
                return process
            self._num -= 1
        if not self._num:
            return self._new()
        free: asyncio.Future[LimitedProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(free)
        try:
            return await free
        except asyncio.CancelledError:
            if free.done() and not free.cancelled() and free.exception() is None:
                self._give_back(free.result())
            raise

    def _start_another(self) -> None:
        """What is rendered takes long: the next should not have to wait for it."""
        if not self._idle and self._num < _MOST:
            with contextlib.suppress(OverloadedError):
                self._give_back(self._new())

    def _give_back(self, process: "LimitedProcess") -> None:
        """Gives the process to the one that has waited longest. Few are kept that are not needed."""
        try:
            if process.has_ended:
                self._num -= 1
                if self._num and not self._waiting:
                    return
                process = self._new()
        except OverloadedError as error:
            for free in self._waiting:
                if not free.done():
                    free.set_exception(error)
            self._waiting.clear()
            return
        while self._waiting:
            free = self._waiting.popleft()
            if not free.done():  # its client is still there
                free.set_result(process)
                return
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(process)
        else:
            process.end()
            self._num -= 1

    def _new(self) -> "LimitedProcess":
        try:
            process = LimitedProcess(self.task)
        except OSError as error:
            raise OverloadedError(f"A process that {self._what} could not be started ({error}).") from error
        self._num += 1
        return process


class ProcessDied(Exception):
    """It has ended instead of answering."""

    def __init__(self, status: int) -> None:
        super().__init__(signal.Signals(-status).name if status < 0 else f"exit status {status}")
        self.status = status


class LimitedProcess:
    """One process, and our end of its socket."""

    def __init__(self, task: str) -> None:
        self.is_prepared = False  # it has worked on the first frame
        self.has_ended = False
        self._sock, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _launch(theirs.fileno(), task)
            except OSError:
                self._sock.close()
                raise
        self._sock.setblocking(False)
        self._finalizer = weakref.finalize(self, _end, self._process, self._sock)

    async def ask(self, frame: bytes) -> bytes:
        """The answer to one frame."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._sock, LENGTH.pack(len(frame)) + frame)
            (length,) = LENGTH.unpack(await self._read(LENGTH.size))
            return bytes(await self._read(length))
        except (OSError, EOFError) as error:
            self.has_ended = True
            while (status := self._process.poll()) is None:  # its socket is closed a moment before that is known
                await asyncio.sleep(0.001)
            raise ProcessDied(status) from error

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._process.kill()
            self._reap()

    def _reap(self) -> None:
        if self._process.poll() is None:
            asyncio.get_running_loop().call_later(0.01, self._reap)

    async def _read(self, num_bytes: int) -> bytearray:
        loop = asyncio.get_running_loop()
        found = bytearray(num_bytes)
        with memoryview(found) as rest:
            num_read = 0
            while num_read < num_bytes:
                num_new = await loop.sock_recv_into(self._sock, rest[num_read:])
                if not num_new:
                    raise EOFError
                num_read += num_new
        return found


def _launch(fd: int, task: str) -> "subprocess.Popen[bytes]":
    module = "everserve.gateway.text.limited_process"
    return subprocess.Popen(
        [sys.executable, "-m", module, "--gateway-pid", str(os.getpid()), "--fd", str(fd), "--task", task],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)},
    )


def _end(process: "subprocess.Popen[bytes]", sock: socket.socket) -> None:
    sock.close()
    process.kill()
    process.wait()
