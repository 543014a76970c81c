"""The first zygote of an instance, started before anything else is done.

Its imports are the longest part of a start, and need nothing of what `everserve serve` does first: import its own
modules, read flags and the model's config, look at devices, start MPS. So it starts as soon as the command is known,
and the rest it is told by the supervisor, with its first message (StartZygote).

    everserve serve ... ──> early zygote: imports ....................... StartZygote, ForkWorker ──> workers
                      └───> flags, model, devices ──> supervisor: takes it over ──┘

A command that ends without a supervisor (flags that are refused, Ctrl-C) ends it; if the command is killed, the kernel
does, as with every process of an instance.
"""

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from everserve.procs.launching import ENVIRONMENT, Launch, launch


@dataclass(frozen=True)
class EarlyZygote:
    """A process, and this end of its control channel."""

    process: "subprocess.Popen[bytes]"
    control: socket.socket


_waiting: list[EarlyZygote] = []  # at most one, which no supervisor has taken


@contextmanager
def early_zygote(arguments: Sequence[str], launch: Launch = launch) -> Iterator[None]:
    """Within the context `take` has a zygote, if the command with these arguments needs one. One that was not taken is
    killed in the end."""
    if is_needed(arguments):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = launch("zygote", {"--control-fd": theirs}, os.environ | ENVIRONMENT)
        _waiting.append(EarlyZygote(process, ours))
    try:
        yield
    finally:
        left = take()
        if left is not None:
            left.process.kill()
            left.process.wait()
            left.control.close()


def is_needed(arguments: Sequence[str]) -> bool:
    """Whether this looks like the start of a server. If it turns out not to be, nothing but time was spent."""
    return len(arguments) > 1 and arguments[0] == "serve" and "--help" not in arguments


def take() -> EarlyZygote | None:
    """It belongs to the caller now; None if there is none."""
    return _waiting.pop() if _waiting else None
