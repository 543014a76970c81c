"""Where observations of devices come from: threads that only post, and a descriptor that wakes the orchestrator.

    --health-source FILE       read whenever it changes; may come to be later
    --health-source COMMAND    run every few seconds; its output counts if it exits with status 0
    NVML                       nvml.py, where there are GPUs and nvidia-ml-py is installed

A source that cannot be read keeps what it said last: that a file is missing says nothing about devices. Each kind of
trouble is logged once until the source works again, and counted.
"""

import contextlib
import logging
import os
import queue
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from everserve.plan.health import Observation
from everserve.plan.health_lines import parse

log = logging.getLogger(__name__)

_FILE_EVERY_S = 0.25
_COMMAND_EVERY_S = 3.0
_COMMAND_WITHIN_S = 10.0
_MAX_BYTES = 1 << 20  # of one text
_SHOWN = 120  # characters of a line that cannot be read

Post = Callable[[Observation], None]


class HealthInbox:
    """Readable (for select) when a source has posted."""

    def __init__(self) -> None:
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._posts: queue.SimpleQueue[Observation] = queue.SimpleQueue()
        self.num_troubles = 0  # lines that could not be read, commands that failed

    def fileno(self) -> int:
        return self._event_fd

    def post(self, seen: Observation) -> None:
        """Called by the threads of sources."""
        self._posts.put(seen)
        os.eventfd_write(self._event_fd, 1)

    def count_trouble(self, num: int = 1) -> None:
        """Called by one thread at most: that of the health source."""
        self.num_troubles += num
        os.eventfd_write(self._event_fd, 1)

    def take(self) -> list[Observation]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._posts.get_nowait())
        return found


class HealthSource:
    """The thread of --health-source. It ends with its process."""

    def __init__(self, source: str, inbox: HealthInbox) -> None:
        self._source = source
        self._inbox = inbox
        self._command = command_of(source)
        self._said = ""  # the last trouble
        self._stamp: object = None  # of the file that was read last
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health source", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                text = self._read_file() if self._command is None else self._run_command(self._command)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._trouble("cannot be read", str(error))
            else:
                if text is not None:
                    self._tell(text)
            if self._is_over.wait(_FILE_EVERY_S if self._command is None else _COMMAND_EVERY_S):
                return

    def _tell(self, text: str) -> None:
        fed, bad = parse(text)
        self._inbox.post(fed)
        if bad:
            self._trouble("has lines that are not DEVICE LEVEL REASON", repr(bad[0][:_SHOWN]), len(bad))
        else:
            self._said = ""

    def _trouble(self, what: str, detail: str, num: int = 1) -> None:
        self._inbox.count_trouble(num)
        if what != self._said:
            self._said = what
            log.warning("health source %s %s: %s", self._source, what, detail)

    def _read_file(self) -> str | None:
        """None: it has not changed."""
        with Path(self._source).open("rb") as file:
            status = os.fstat(file.fileno())
            stamp = status.st_ino, status.st_mtime_ns, status.st_size
            if stamp == self._stamp:
                return None
            text = file.read(_MAX_BYTES).decode(errors="replace")
        self._stamp = stamp
        return text

    def _run_command(self, command: list[str]) -> str:
        """In a session of its own, so that a shell's children end with it. If this process dies, a command that still
        runs gets SIGPIPE at its next line."""
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                output, _ = process.communicate(timeout=_COMMAND_WITHIN_S)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode:
            raise subprocess.SubprocessError(f"exit status {process.returncode}")
        return output[:_MAX_BYTES].decode(errors="replace")


def command_of(source: str) -> list[str] | None:
    """The command that a --health-source is, as its words; None: it is a file, perhaps one that is not there yet."""
    if Path(source).is_file() and not os.access(source, os.X_OK):
        return None
    try:
        words = shlex.split(source)
    except ValueError:  # an open quote
        return None
    return words if words and shutil.which(words[0]) else None
