"""A pool on a device is adopted only when the process that had it is gone, whatever state it is in before."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from everserve.backends.cuda.predecessor import BORN_AT, Predecessor, PredecessorStays, own
from everserve.procs import process
from tests.logs import SHAPE, Owner, Stream, new_log
from tests.process.cluster import wait_until

A_MOMENT_S = 0.1


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
    ctypes.c_int64.from_address(log.layout.base + BORN_AT).value -= 1
    Predecessor(log, quiet_s=0.0).wait()


def test_the_log_is_what_it_was():
    """The name stands beside the header: others find the same log."""
    log = new_log(SHAPE)
    own(log)
    owner = Owner(log, in_log=False)
    owner.streams["a"] = Stream(0)
    owner.step({"a": [1, 2, 3]})
    owner.commit("a")
    assert [record.num_tokens for record in log.records()] == [3]
