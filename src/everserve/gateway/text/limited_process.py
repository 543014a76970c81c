"""A process that works on what clients send, within limits: `python -m everserve.gateway.text.limited_process`.

Chat templates are programs that come with models, and clients choose their input: the messages, and some variables. A
program may loop for ever, or multiply a text until memory is full; and templates in wide use take seconds for a
thousand messages, because they look through all of them for each. Grammars come from clients as a whole. In a thread of
the gateway either would delay every stream, and nothing could end it in the middle of one operation. Here the kernel
does:

    CPU time of one answer   a timer, whose signal ends the process, whatever it is doing
    memory                   a limit of the address space: a MemoryError, told as any other error

The gateway's side is limited.py, which starts another process when one has ended. A frame is its length in 4 bytes, and
that many bytes. The first says what the process is for; each other one is a piece of work. Each is answered with OK and
the result, FAILED and why, or TOO_LONG:

    --task    first frame                     other frames
    template  "source", "special_tokens"      arguments of ChatTemplate.render -> the text
    grammar   "directory", "vocab_size"       a grammar -> nothing: it can be used
"""

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from everserve.procs import process

OK, FAILED, TOO_LONG = b"=", b"!", b">"
LENGTH = struct.Struct("=I")
_NICE = 5  # a rendering that takes long should not delay tokens
_MAX_REASON = 500  # characters


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateway-pid", type=int, required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--task", choices=("template", "grammar"), required=True)
    arguments = parser.parse_args()
    process.die_with(arguments.gateway_pid)
    process.set_name(f"es-{arguments.task}")
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # before any process that keeps streams
    serve(socket.socket(fileno=arguments.fd), _Template() if arguments.task == "template" else _Grammar())


class Task(Protocol):
    """What a process is for."""

    def prepare(self, start: dict[str, Any]) -> None:
        """Prepares for work, by the first frame."""

    def work(self, frame: bytes) -> bytes:
        """The answer to any other one."""


class _Template:
    """Renders chats."""

    def prepare(self, start: dict[str, Any]) -> None:
        from everserve.gateway.text.chat_template import ChatTemplate  # noqa: PLC0415 (the gateway needs no Jinja)

        self._template = ChatTemplate(start["source"], start["special_tokens"])

    def work(self, frame: bytes) -> bytes:
        text = self._template.render(**json.loads(frame))
        return TOO_LONG if text is None else OK + text.encode()


class _Grammar:
    """Compiles grammars, as workers will, and computes a mask."""

    def prepare(self, start: dict[str, Any]) -> None:
        from everserve.guides.vocabulary import read_vocabulary  # noqa: PLC0415 (nor does it need a vocabulary)

        self._vocabulary = read_vocabulary(Path(start["directory"]), start["vocab_size"])

    def work(self, frame: bytes) -> bytes:
        from everserve.guides.compiling import Compiler  # noqa: PLC0415
        from everserve.guides.guide import Guide  # noqa: PLC0415
        from everserve.tables.requests import Guided  # noqa: PLC0415

        Guide(Compiler(self._vocabulary), Guided(grammar=frame.decode()))
        return OK


def serve(gateway: socket.socket, task: Task) -> None:
    """Answer until the gateway's end is closed."""
    frames = _frames(gateway)
    if (first := next(frames, None)) is None:
        return
    start = json.loads(first)
    _limit_memory(start["memory_bytes"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it ends the process

    def prepare() -> bytes:
        task.prepare(start)
        return OK

    _answer(gateway, prepare, start["prepare_s"])
    os.nice(_NICE)
    for frame in frames:
        _answer(gateway, partial(task.work, frame), start["cpu_s"])


def _answer(gateway: socket.socket, work: Callable[[], bytes], cpu_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        answer = work()
    except MemoryError:
        answer = FAILED + b"it takes too much memory"
    except Exception as error:  # a template is a program; whatever it raises is about these messages
        answer = FAILED + str(error)[:_MAX_REASON].encode(errors="replace")
    signal.setitimer(signal.ITIMER_PROF, 0)
    gateway.sendall(LENGTH.pack(len(answer)) + answer)


def _limit_memory(num_bytes: int) -> None:
    """So much more than this process has already; and no file of all of it, if it ends by a signal."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for what, most in ((resource.RLIMIT_AS, pages * resource.getpagesize() + num_bytes), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _frames(sock: socket.socket) -> Iterator[bytes]:
    while head := _read(sock, LENGTH.size):
        yield _read(sock, *LENGTH.unpack(head))


def _read(sock: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, or none at the end."""
    found = bytearray(num_bytes)
    rest = memoryview(found)
    while rest:
        num_read = sock.recv_into(rest)
        if not num_read:
            return b""
        rest = rest[num_read:]
    return bytes(found)


if __name__ == "__main__":
    main()
