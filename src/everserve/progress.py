"""How far it is: a bar on a terminal, a line now and then elsewhere, nothing for those who want none.

It has no thread. The code that works says how far it is, as often as it likes, and now and then that is shown: what is
measured meanwhile is disturbed as little as possible.
"""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich import progress as bars
from rich.console import Console
from rich.table import Column

_LIVE_S, _PLAIN_S = 0.1, 5.0  # at most so often


class Progress:
    """One phase after the other. Everything goes to stderr, apart from the output."""

    def __init__(self, out: TextIO | None = None, *, is_quiet: bool = False) -> None:
        self._out = out if out is not None else sys.stderr
        self._is_quiet = is_quiet
        self._bar: bars.Progress | None = None  # while there is a phase, and a terminal
        self._task = bars.TaskID(0)
        self._what, self._unit = "", ""
        self._done, self._total = 0.0, 0.0
        self._shown_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._is_quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self._out, flush=True)
        self._shown_s = time.monotonic()

    def begin(self, what: str, total: float, unit: str = "") -> Self:
        """A new phase, of so many steps or seconds."""
        self.end()
        self._what, self._unit, self._done, self._total = what, unit, 0.0, total
        self._shown_s = time.monotonic()
        if self._out.isatty() and not self._is_quiet:
            self._bar = _bar(self._out)
            self._task = self._bar.add_task(what, total=total, unit=unit, note="")
            self._bar.start()
        return self

    def advance(self, note: str = "") -> None:
        """One step more."""
        self.update(self._done + 1, note)

    def update(self, done: float, note: str = "") -> None:
        """So far."""
        self._done = done
        now_s = time.monotonic()
        is_due = now_s - self._shown_s >= (_LIVE_S if self._bar is not None else _PLAIN_S)
        if self._is_quiet or not (is_due or (self._bar is not None and done >= self._total)):
            return
        self._shown_s = now_s
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
            self._bar.refresh()
        else:
            text = f"{self._what}: {done:.0f} of {self._total:.0f}{self._unit}"
            print(f"{text}, {note}" if note else text, file=self._out, flush=True)

    def end(self) -> None:
        """The phase is over; its bar stays."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar(out: TextIO) -> bars.Progress:
    return bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=24),
        bars.TextColumn("{task.completed:.0f}/{task.total:.0f}{task.fields[unit]}"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[note]}", style="dim", table_column=Column(no_wrap=True, ratio=1)),
        console=Console(file=out),
        auto_refresh=False,
        expand=True,
    )
