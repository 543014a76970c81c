"""Typed events: what happened, where and when. Tests, benchmarks and the dashboard read these, never log text.

Each process appends to its own file `DIR/<process>-<pid>.jsonl` when `--event-log DIR` is given, and always tells the
supervisor, which passes them on to the gateway for `/events`.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec


def _snake(name: str) -> str:
    """WorkerGone -> worker_gone: the event's name on the wire and in `/events`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_snake):
    """Base of all events. `at_s` is the machine's monotonic clock, comparable between its processes."""

    at_s: float = msgspec.field(default_factory=time.monotonic)
    unix_s: float = msgspec.field(default_factory=time.time)
    process: str
    pid: int = msgspec.field(default_factory=os.getpid)


class ProcessStarted(Event, frozen=True):
    """A process was started by the supervisor."""

    child: str
    child_pid: int


class WorkerBecameReady(Event, frozen=True):
    """A worker has its weights and accepts requests."""

    rank: int
    incarnation: int
    load_s: float
    num_blocks: int


class Serving(Event, frozen=True):
    """All processes are ready; clients are welcome at `url`."""

    url: str


class WorkerGone(Event, frozen=True):
    """A worker's process ended."""

    rank: int
    incarnation: int
    exit_status: int


class EpochPublished(Event, frozen=True):
    """The membership table changed."""

    epoch: int
    violations: tuple[str, ...]


class RequestPreempted(Event, frozen=True):
    """KV blocks ran out; this stream gave its blocks back and will be recomputed."""

    rank: int
    request_id: str
    num_tokens: int


class BadBytes(Event, frozen=True):
    """Frames arrived that are not one of our messages; they were dropped (said once per channel)."""

    num_dropped: int


class ShutdownBegan(Event, frozen=True):
    """The instance stops; running requests may finish within the grace time."""

    reason: str
    grace_s: float


AnyEvent = (
    ProcessStarted
    | WorkerBecameReady
    | Serving
    | WorkerGone
    | EpochPublished
    | RequestPreempted
    | BadBytes
    | ShutdownBegan
)


class EventLog:
    """Where one process writes its events: a file of its own, if asked for, and whoever listens."""

    def __init__(self, process: str, directory: str | None, tell: Callable[[AnyEvent], None] | None = None) -> None:
        self.process = process
        self._tell = tell
        self._file = None
        if directory is not None:
            path = Path(directory)
            path.mkdir(parents=True, exist_ok=True)
            self._file = (path / f"{process}-{os.getpid()}.jsonl").open("ab", buffering=0)

    def append(self, event: AnyEvent) -> None:
        """Record an event of this process, or pass on one of another process."""
        if self._file is not None and event.process == self.process:
            self._file.write(msgspec.json.encode(event) + b"\n")
        if self._tell is not None:
            self._tell(event)
