"""A pool on a device is adopted only when the process that had it is gone, whatever state it is in before."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from everserve.backends.cuda.predecessor import (
    BORN_AT,
    CHECK_AT,
    PID_AT,
    Predecessor,
    PredecessorStays,
    born_at,
    check_of,
    own,
)
from everserve.procs import process
from tests.support.cluster import wait_until
from tests.support.logs import SHAPE, Owner, Stream, new_log

A_MOMENT_S = 0.1


def word(log, at: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(log.layout.base + at)


@pytest.fixture
def child() -> Iterator[subprocess.Popen]:
    popen = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield popen
    popen.kill()
    popen.wait()


def test_a_new_log_was_nobodys():
    Predecessor(new_log(SHAPE)).wait(timeout_s=0)


def test_neither_a_stopped_one_nor_a_dead_one_that_is_still_there_is_gone(child):
    log = new_log(SHAPE)
    own(log, child.pid)
    predecessor = Predecessor(log, quiet_s=0.0)
    for signum, state in ((signal.SIGSTOP, "T"), (signal.SIGKILL, "Z")):
        os.kill(child.pid, signum)
        wait_until(lambda state=state: process.state_of(child.pid) == state, what=state)
        with pytest.raises(PredecessorStays, match=f"process {child.pid}"):
            predecessor.wait(A_MOMENT_S)
    child.wait()
    predecessor.wait()


def test_it_is_quiet_for_a_while_after_its_end(child):
    log = new_log(SHAPE)
    own(log, child.pid)
    child.kill()
    child.wait()
    with pytest.raises(PredecessorStays):
        Predecessor(log, quiet_s=600.0).wait(A_MOMENT_S)
    Predecessor(log, quiet_s=0.0).wait()


def test_whoever_has_its_pid_now_is_somebody_else(child):
    log = new_log(SHAPE)
    own(log, child.pid)
    born = born_at(child.pid) - 1
    for at, value in ((BORN_AT, born), (CHECK_AT, check_of(child.pid, born))):
        word(log, at).value = value
    Predecessor(log, quiet_s=0.0).wait()


@pytest.mark.parametrize("at", [PID_AT, BORN_AT, CHECK_AT])
def test_nobody_knows_who_it_was(child, at, caplog):
    """A bit of what is said of it has been flipped: it may be any process, and is waited for as long as any needs."""
    for bit in range(64):
        log = new_log(SHAPE)
        own(log, child.pid)
        flipped = word(log, at).value & (1 << 64) - 1 ^ 1 << bit
        word(log, at).value = flipped
        with pytest.raises(PredecessorStays):
            Predecessor(log, quiet_s=0.0, unknown_s=600.0).wait(timeout_s=0)
    Predecessor(log, quiet_s=600.0, unknown_s=0.0).wait()
    assert caplog.text.count("it cannot be read which process") == 65


def test_the_log_is_what_it_was():
    """The name stands beside the header: others find the same log."""
    log = new_log(SHAPE)
    own(log)
    owner = Owner(log, in_log=False)
    owner.streams["a"] = Stream(0)
    owner.step({"a": [1, 2, 3]})
    owner.commit("a")
    assert [record.num_tokens for record in log.records()] == [3]
