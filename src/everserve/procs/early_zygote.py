"""The first zygote of an instance, started before anything else is done.

Its imports are the longest part of a start, and need nothing of what `everserve serve` does first: import its own
modules, read flags and the model's config, look at devices, start MPS. So root starts it as soon as the command is
known, and the rest it is told by the supervisor, with its first message (StartZygote).

    root ──> early zygote: imports ............................ StartZygote, ForkWorker ──> workers
      └────> supervisor: flags, model, devices ──> takes it over ──┘

If the command ends before (flags that are refused, Ctrl-C), root ends it, as every process that it has started.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from everserve.procs.launching import ENVIRONMENT, Launch, launch


@dataclass(frozen=True)
class EarlyZygote:
    """A process, and this end of its control channel, by number: root and supervisor both have the object."""

    pid: int
    control_fd: int


_waiting: list[EarlyZygote] = []  # at most one, which no supervisor has taken


def begin(launch: Launch = launch) -> None:
    """From now on there is one to `take`, if it can be had: without it the supervisor starts one, when it can."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs, ours, suppress(OSError):
        pid = launch("zygote", {"--control-fd": theirs.fileno()}, os.environ | ENVIRONMENT)
        _waiting.append(EarlyZygote(pid, ours.detach()))


def is_needed(arguments: Sequence[str]) -> bool:
    """Whether this looks like the start of a server. If it turns out not to be, nothing but time was spent."""
    return len(arguments) > 1 and arguments[0] in ("serve", "agent") and "--help" not in arguments


def descriptors() -> frozenset[int]:
    """The descriptors of the zygote that can be taken."""
    return frozenset(early.control_fd for early in _waiting)


def take() -> EarlyZygote | None:
    """It belongs to the caller now; None if there is none."""
    return _waiting.pop() if _waiting else None
