"""The start of a server, as a terminal shows it: a bar for each worker, made of typed events.

`serve` reads them from its own gateway's `/events`, on a thread: the main thread is the supervisor. A command that
starts a server for itself (`demo`) reads them from files. Without a terminal, workers log a line now and then instead.

All processes of a server write to one stderr. While there are bars, it is a pipe, and what comes out of it is printed
above them.
"""

import http.client
import json
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TextIO
from urllib.parse import urlsplit

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from everserve.worker.loading import START_BARS

Event = dict[str, Any]

_CONNECT_S = 600.0  # a gateway that is slow to start lets us wait, not give up


@dataclass
class Row:
    """One worker on its way."""

    name: str
    note: str = "waits for its process"
    share: float | None = None  # loaded; None: nothing is known yet
    is_ready: bool = False


def rows_of(events: Iterable[Event]) -> dict[int, Row]:
    """How far each seat is, by rank, after these events."""
    rows: dict[int, Row] = {}
    for event in events:
        kind, rank = event["event"], event.get("rank", -1)
        if kind == "worker_provisioned":
            rows[rank] = Row(f"worker {rank} {'+'.join(event['roles'])}")
        row = rows.get(rank)
        if row is None:
            continue
        if kind == "worker_started":
            row.note = "starts"
        elif kind == "worker_loading":
            row.note = f"{event['done']} of {event['total']} {event['what']}"
            row.share = event["done"] / max(event["total"], 1)
        elif kind == "worker_became_ready":
            row.note, row.share, row.is_ready = f"ready in {event['load_s']:.1f} s", 1.0, True
        elif kind in ("worker_exited", "fault_detected"):
            row.note, row.share, row.is_ready = "ended; the next one follows", None, False
    return dict(sorted(rows.items()))


class StartBars:
    """Shows the rows until the context is left. Only lines that processes printed meanwhile remain."""

    def __init__(self, console: Console, title: str) -> None:
        self.is_on = console.is_terminal
        self._bars = bars.Progress(
            bars.SpinnerColumn(finished_text="[green]✓"),
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=24),
            bars.TextColumn("{task.fields[note]}", style="dim"),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not self.is_on,
        )
        self._title = self._bars.add_task(title, total=None, note="")
        self._tasks: dict[int, bars.TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """As often as you like."""
        self._bars.stop()

    def show(self, events: Sequence[Event]) -> None:
        """All events so far."""
        rows = rows_of(events)
        num_ready = sum(row.is_ready for row in rows.values())
        self._bars.update(self._title, note=f"{num_ready} of {len(rows)} workers are ready" if rows else "")
        for rank, row in rows.items():
            if rank not in self._tasks:
                self._tasks[rank] = self._bars.add_task(row.name, total=None, note="")
            self._bars.update(
                self._tasks[rank],
                description=row.name,
                total=1.0 if row.share is not None else None,
                completed=row.share or 0.0,
                note=row.note,
            )


class FollowingBars(StartBars):
    """Of a server that starts in this process, until it serves or is gone. Without a terminal it does nothing."""

    def __init__(self, url: str, api_keys: Sequence[str], title: str) -> None:
        self._stderr: _SharedStderr | None = None
        if sys.stderr.isatty():
            self._stderr = _SharedStderr()
        super().__init__(Console(file=self._stderr.terminal if self._stderr is not None else sys.stderr), title)
        self._url = url
        self._api_key = next(iter(api_keys), None)

    def __enter__(self) -> Self:
        super().__enter__()
        if self._stderr is not None:
            os.environ[START_BARS] = "1"
            self._stderr.begin(self._bars.console)
            threading.Thread(target=self._follow, daemon=True, name="start-bars").start()
        return self

    def stop(self) -> None:
        if self._stderr is None:
            super().stop()
            return
        with self._stderr.lock:  # or a line is printed after the last bar, before that is erased
            super().stop()
            self._stderr.pass_on()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._stderr is not None:
            self._stderr.end()

    def _follow(self) -> None:
        events: list[Event] = []
        try:
            for event in _read(self._url, self._api_key):
                events.append(event)
                self.show(events)
                if event["event"] in ("serving", "shutdown_began"):
                    return
        except (OSError, http.client.HTTPException, ValueError):
            return  # it is gone; its own words say why


class _SharedStderr:
    """The stderr of this process and of all its children, through a pipe: above the bars first, then as it comes.

    The children have it for good, so it is read until the end. They all die with us.
    """

    def __init__(self) -> None:
        self._fd = os.dup(sys.stderr.fileno())
        self.terminal: TextIO = os.fdopen(self._fd, "w", closefd=False)
        self.lock = threading.Lock()  # held to print, and to end the bars
        self._console: Console | None = None  # while there are bars
        self._thread: threading.Thread | None = None

    def begin(self, console: Console) -> None:
        self._console = console
        reader, writer = os.pipe()
        os.dup2(writer, sys.stderr.fileno())
        os.close(writer)
        self._thread = threading.Thread(target=self._run, args=(reader,), daemon=True, name="stderr")
        self._thread.start()

    def pass_on(self) -> None:
        """There are no bars any more. Holds the lock."""
        self._console = None

    def end(self) -> None:
        """What was written last is shown, too."""
        if self._thread is not None:
            os.dup2(self._fd, sys.stderr.fileno())
            self._thread.join(timeout=1.0)

    def _run(self, reader: int) -> None:
        rest = b""
        while data := os.read(reader, 1 << 16):
            with self.lock:
                if self._console is None:
                    os.write(self._fd, rest + data)
                    rest = b""
                    continue
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._console.print(Text.from_ansi(line.decode(errors="replace")), soft_wrap=True)
        os.write(self._fd, rest)
        os.close(reader)


def _read(url: str, api_key: str | None) -> Iterable[Event]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_CONNECT_S)
    try:
        connection.request("GET", "/events", headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
        response = connection.getresponse()
        while line := response.readline():
            if line.startswith(b"data:"):
                yield json.loads(line[5:])
    finally:
        connection.close()
