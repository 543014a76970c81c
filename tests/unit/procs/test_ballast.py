"""Low descriptor numbers are in use, so that what closes one by mistake closes nothing."""

import os
import resource
from pathlib import Path

import pytest

from everserve.procs.ballast import Ballast


@pytest.fixture
def free():
    """Numbers that this process, which has run other tests, does not use; a ballast that ends behind them has them."""
    used = _used()
    return [number for number in range(len(used) + 20) if number not in used][:20]


def test_low_numbers_are_not_given_to_anything_else(free):
    ballast = Ballast(free[-1] + 1)
    try:
        opened = os.open(os.devnull, os.O_RDONLY)
        os.close(opened)
        assert opened > free[-1]
        assert ballast.refill() == []
    finally:
        ballast.close()


def test_a_number_that_was_closed_is_taken_again(free):
    ballast = Ballast(free[-1] + 1)
    try:
        os.close(free[-1])
        os.close(free[-3])
        assert ballast.refill() == [free[-3], free[-1]]
        assert ballast.refill() == []
        assert Path(f"/proc/self/fd/{free[-1]}").readlink() == Path(os.devnull)
    finally:
        ballast.close()


def test_what_was_in_use_before_is_left_alone(free):
    own = os.open(os.devnull, os.O_RDONLY)
    ballast = Ballast(free[-1] + 1)
    try:
        os.close(own)
        os.close(free[-1])
        assert ballast.refill() == [free[-1]]
        assert not Path(f"/proc/self/fd/{own}").exists()
    finally:
        ballast.close()


def test_where_descriptors_are_few_most_of_them_are_left():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(_used()) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        ballast = Ballast(10 * most)
        opened = os.open(os.devnull, os.O_RDONLY)
        os.close(opened)
        ballast.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _used() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}
