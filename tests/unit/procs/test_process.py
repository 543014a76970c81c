"""What is said of processes that have ended."""

import signal

import pytest

from everserve.procs import process

NAMELESS = signal.SIGRTMIN + 1


@pytest.mark.parametrize(
    ("status", "words"),
    [(3, "exit status 3"), (-signal.SIGKILL, "signal SIGKILL"), (-NAMELESS, f"signal {NAMELESS}")],
)
def test_how_a_process_has_ended(status: int, words: str) -> None:
    assert process.how(status) == words
