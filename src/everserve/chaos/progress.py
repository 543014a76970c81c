"""How far it is: one line that changes on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import TextIO

_LIVE_S, _PLAIN_S = 0.25, 15.0


class Progress:
    """Says at most as much as a reader can follow."""

    def __init__(self, out: TextIO = sys.stderr) -> None:
        self._out = out
        self._is_live = out.isatty()
        self._said_s = float("-inf")
        self._width = 0

    def say(self, text: str) -> None:
        """A new phase: always said, on a line of its own."""
        self.end_line()
        print(text, file=self._out, flush=True)
        self._said_s = time.monotonic()

    def update(self, text: str) -> None:
        """Where the phase stands."""
        if time.monotonic() - self._said_s < (_LIVE_S if self._is_live else _PLAIN_S):
            return
        self._said_s = time.monotonic()
        if self._is_live:
            print("\r" + text.ljust(self._width), end="", file=self._out, flush=True)
            self._width = len(text)
        else:
            print(text, file=self._out, flush=True)

    def end_line(self) -> None:
        if self._width:
            print(file=self._out)
            self._width = 0
