"""Signals end commands, wherever they were started and whatever waits for Ctrl-C at the moment."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from everserve.cli import _handle_signals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests themselves run under nohup
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_of_them_interrupts(number: int) -> None:
    _handle_signals()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_of_them_is_ctrl_c_for_an_event_loop_that_handles_it(number: int) -> None:
    """As `chaos` does, which ends its storm then and gives its verdict."""

    async def wait() -> None:
        came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, came.set)
        os.kill(os.getpid(), number)
        await asyncio.wait_for(came.wait(), 20)

    _handle_signals()
    asyncio.run(wait())


def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _handle_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
