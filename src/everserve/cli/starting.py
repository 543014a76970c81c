"""The start of a server, as a terminal shows it: a bar for each worker, made of typed events.

`serve` has a process that reads them from the gateway's `/events`. A command that starts a server for itself (`demo`)
reads them from files. Without a terminal, workers log a line now and then instead.

All processes of a server write to one stderr. While there are bars, it is a pipe, and what comes out of it is printed
above them.
"""

import contextlib
import http.client
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from everserve.procs import process
from everserve.words import count
from everserve.worker.loading import START_BARS

Event = dict[str, Any]

_STDERR = 2
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
        """Ends the lines; may be called as often as you like."""
        self._bars.stop()

    def show(self, events: Sequence[Event]) -> None:
        """All events so far."""
        rows = rows_of(events)
        num_ready = sum(row.is_ready for row in rows.values())
        self._bars.update(self._title, note=f"{num_ready} of {count(len(rows), 'worker', 'are')} ready" if rows else "")
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


@contextlib.contextmanager
def bars_beside(url: str, api_keys: Sequence[str], title: str, is_wanted: bool = True) -> Iterator[list[int]]:
    """Bars of a server that starts in this process, until it serves or is gone. Without a terminal, or where lines are
    for other programs, there are none.

    A process of its own shows them, because the supervisor may die (procs/root.py), and what is read of a pipe must
    be read until the end: all processes have it as their stderr for good. Yields its pid, if there is one.
    """
    if not (is_wanted and sys.stderr.isatty()):
        yield []
        return
    sys.stderr.flush()
    stderr = sys.stderr.fileno()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_bars(FollowingBars(url, api_keys, title, reader))
    terminal = os.dup(stderr)
    os.dup2(writer, stderr)
    os.close(writer)
    os.close(reader)
    os.environ[START_BARS] = "1"
    try:
        yield [pid]
    finally:  # what was written last is shown, too
        sys.stderr.flush()
        os.dup2(terminal, stderr)
        os.close(terminal)
        process.wait_for_ends([pid], process.LAST_LINES_S)


def _be_bars(bars: "FollowingBars") -> None:
    """Never returns. It has copies of what the supervisor has open, which are not needed."""
    status = os.EX_SOFTWARE
    try:
        process.set_name("es-bars")
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
            signal.signal(signum, signal.SIG_IGN)  # it ends when all others have
        bars.close_all_else()
        bars.run()
        status = 0
    finally:
        os._exit(status)


class FollowingBars(StartBars):
    """Follows a server's events, and shows what its processes write to `lines`, the reading end of their stderr: above
    the bars first, then as it comes."""

    def __init__(self, url: str, api_keys: Sequence[str], title: str, lines: int) -> None:
        super().__init__(Console(file=sys.stderr), title)
        self._url = url
        self._api_key = next(iter(api_keys), None)
        self._lines = lines
        self._lock = threading.Lock()  # held to print, and to end the bars
        self._has_ended = False

    def close_all_else(self) -> None:
        """Closes, in a new process, every descriptor but that of the lines, and the terminal."""
        os.closerange(3, self._lines)
        os.closerange(self._lines + 1, os.sysconf("SC_OPEN_MAX"))

    def run(self) -> None:
        """Until the last process that could write has ended."""
        self._bars.start()
        threading.Thread(target=self._follow, daemon=True, name="start-bars").start()
        self._pass_on()

    def stop(self) -> None:
        with self._lock:  # or a line is printed after the last bar, before that is erased
            super().stop()
            self._has_ended = True

    def _follow(self) -> None:
        events: list[Event] = []
        try:
            for event in _read(self._url, self._api_key):
                events.append(event)
                self.show(events)
                if event["event"] in ("serving", "shutdown_began"):
                    break
        except (OSError, http.client.HTTPException, ValueError):
            pass  # it is gone; its own words say why
        self.stop()

    def _pass_on(self) -> None:
        rest = b""
        while data := os.read(self._lines, 1 << 16):
            with self._lock:
                if self._has_ended:
                    _write(rest + data)
                    rest = b""
                    continue
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._bars.console.print(Text.from_ansi(line.decode(errors="replace")), soft_wrap=True)
        self.stop()
        _write(rest)


def _write(data: bytes) -> None:
    """Writes to the terminal; it may have been closed."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(_STDERR, data) :]


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
