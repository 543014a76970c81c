"""Waiting for a device: what it returns for, and when it sleeps."""

import ctypes
import resource
import time

import numpy as np
import pytest

from everserve.backends.cuda.waiting import load
from everserve.native import library
from everserve.seam.outcomes import Outcome

NAP_NS = 20_000
MS = 1_000_000


def wait(word: np.ndarray, want: int, timeout_ns: int, due_ns: int) -> tuple[int, int]:
    """The outcome, and how often the thread has slept."""
    # A PyDLL does not let go of the interpreter's lock, for which the thread would have to wait afterwards.
    function = ctypes.PyDLL(str(library("device_wait"))).es_device_wait
    function.argtypes, function.restype = load().argtypes, ctypes.c_int64
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    outcome = function(word.ctypes.data, want, None, 0, None, 0, timeout_ns, NAP_NS, time.monotonic_ns() + due_ns)
    return outcome, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before


@pytest.mark.parametrize("due_ns", [-100 * MS, 0, 100 * MS])
def test_what_is_there_is_not_waited_for(due_ns):
    assert wait(np.array([3], np.int64), 3, 100 * MS, due_ns) == (Outcome.DONE, 0)


def test_nobody_sleeps_while_it_is_due():
    outcome, num_naps = wait(np.zeros(1, np.int64), 1, MS // 5, 0)
    assert (outcome, num_naps) == (Outcome.TIMEOUT, 0)


@pytest.mark.parametrize("due_ns", [-100 * MS, 100 * MS])
def test_a_long_wait_is_slept_through(due_ns):
    outcome, num_naps = wait(np.zeros(1, np.int64), 1, 5 * MS, due_ns)
    assert outcome == Outcome.TIMEOUT and num_naps > 0
