"""How far it is: on a terminal, elsewhere, and for those who do not want to know."""

import io
from typing import Any

import pytest

from everserve import progress
from everserve.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A second per look."""
    now = iter(range(1000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))
    return now


def test_elsewhere_than_on_a_terminal_lines_are_rare(clock: Any) -> None:
    out = io.StringIO()
    with Progress(out) as shown:
        shown.say("begin")
        shown.begin("work", 20, " s")
        for i in range(20):
            shown.update(i + 1, f"{i} things")
    lines = out.getvalue().splitlines()
    assert lines[0] == "begin" and lines[1] == "work: 5 of 20 s, 4 things" and len(lines) == 5


def test_what_is_over_at_once_says_nothing() -> None:
    out = io.StringIO()
    with Progress(out).begin("work", 100) as shown:
        for _ in range(100):
            shown.advance()
    assert out.getvalue() == ""


def test_on_a_terminal_there_is_a_bar_and_the_cursor_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with pytest.raises(KeyboardInterrupt), Progress(out).begin("work", 3) as shown:
        shown.advance("first")
        shown.say("above")
        shown.update(3, "last")
        raise KeyboardInterrupt
    text = out.getvalue()
    assert "━" in text and "3/3" in text and "last" in text and "above\n" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


@pytest.mark.parametrize("out", [Terminal(), io.StringIO()])
def test_quiet(out: io.StringIO, clock: Any) -> None:
    with Progress(out, is_quiet=True).begin("work", 3) as shown:
        shown.say("hello")
        for _ in range(30):
            shown.advance()
    assert out.getvalue() == ""
