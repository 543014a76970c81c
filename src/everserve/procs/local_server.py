"""`everserve serve` as a child process, for demos, benchmarks and tests.

The address and everything else come from the server's typed events, never from its log text.

How long a start takes is not limited here: on a busy machine, and the first time, it may be minutes. What hangs in it
the server replaces, or it gives up and says why.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from everserve.errors import ConfigError, EverserveError, UserError
from everserve.procs.process import die_with

_OWN_WORDS = "everserve: "  # what the command says itself: a user's mistake, or a machine that cannot


class LocalServer:
    """A context manager: the server is ready on entry, and ended with all its children on exit."""

    def __init__(
        self,
        model: str,
        *flags: str,
        on_wait: Callable[[list[dict[str, Any]]], None] = lambda events: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`on_wait`: called repeatedly while it starts, with all events so far. `environment`: replaces that of this
        process."""
        if any(flag.split("=")[0] in ("--event-log", "--event-log-bytes") for flag in flags):
            raise ConfigError("--event-log: this command reads the server's events itself, and sets the flag")
        self.model = model
        self.url = ""
        self._flags = flags
        self._on_wait = on_wait
        self._environment = environment
        self._stack = contextlib.ExitStack()
        self.process: subprocess.Popen[bytes] | None = None
        self._event_files: dict[Path, _EventFile] = {}
        self._reading = threading.Lock()

    def __enter__(self) -> "LocalServer":
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="everserve-")))
        self._log = self._stack.enter_context((self._directory / "log").open("wb+"))
        command = [sys.executable, "-m", "everserve.cli", "serve", self.model, "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--event-log", str(self._directory / "events"), "--event-log-bytes", "0", *self._flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=self._environment,
            start_new_session=True,  # Ctrl-C reaches only the parent, which then stops the server in order
            # A parent that is killed cannot. (noqa: locks held by threads do not matter to a single system call.)
            preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509
        )
        try:
            self.url = self._wait_for("serving")["url"]
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)  # twice: do not wait for running requests
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._stack.close()

    def events(self, process: str = "") -> list[dict[str, Any]]:
        """All events so far, by time; of processes whose name begins with `process`."""
        with self._reading:
            paths = (self._directory / "events").glob(f"{process}*.jsonl")
            found = [event for path in paths for event in self._event_files.setdefault(path, _EventFile()).read(path)]
        return sorted(found, key=lambda event: event["at_s"])

    def log_text(self) -> str:
        """What the server printed, to show; do not parse it."""
        return (self._directory / "log").read_text(errors="replace")

    def save(self, directory: Path) -> None:
        """Copy its output and all its events to this directory."""
        shutil.copytree(self._directory, directory, dirs_exist_ok=True)

    def _wait_for(self, name: str) -> dict[str, Any]:
        while True:
            events = self.events()
            self._on_wait(events)
            found = [event for event in events if event["event"] == name]
            if found:
                return found[0]
            self._check_that_it_runs()
            time.sleep(0.02)

    def _check_that_it_runs(self) -> None:
        assert self.process is not None
        status = self.process.poll()
        if status is None:
            return
        text = self.log_text().strip()
        last = text.rpartition("\n")[2]
        if last.startswith(_OWN_WORDS):
            raise UserError(last.removeprefix(_OWN_WORDS))
        raise EverserveError(f"the server ended before it served (exit status {status}): {text[-2000:]}")


class _EventFile:
    """What was read of a file that grows: who waits for an event looks many times a second."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._num_bytes = 0

    def read(self, path: Path) -> list[dict[str, Any]]:
        """All events so far."""
        with path.open("rb") as file:
            file.seek(self._num_bytes)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # the last line may not be complete yet
        self._events += [json.loads(line) for line in whole.splitlines() if line]
        self._num_bytes += len(whole)
        return self._events
