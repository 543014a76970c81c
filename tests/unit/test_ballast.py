"""Low descriptor numbers are in use, so that what closes one by mistake closes nothing."""

import os
import resource
from pathlib import Path

from everserve.procs.ballast import Ballast

END = 128


def test_low_numbers_are_not_given_to_anything_else():
    ballast = Ballast(END)
    try:
        opened = os.open(os.devnull, os.O_RDONLY)
        os.close(opened)
        assert opened >= END
        assert ballast.refill() == []
    finally:
        ballast.close()


def test_a_number_that_was_closed_is_taken_again():
    ballast = Ballast(END)
    try:
        os.close(END - 1)
        os.close(END - 3)
        assert ballast.refill() == [END - 3, END - 1]
        assert ballast.refill() == []
        assert Path(f"/proc/self/fd/{END - 1}").readlink() == Path(os.devnull)
    finally:
        ballast.close()


def test_what_was_in_use_before_is_left_alone():
    own = os.open(os.devnull, os.O_RDONLY)
    ballast = Ballast(END)
    try:
        os.close(own)
        os.close(END - 1)
        assert ballast.refill() == [END - 1]
        assert not Path(f"/proc/self/fd/{own}").exists()
    finally:
        ballast.close()


def test_where_descriptors_are_few_most_of_them_are_left():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, (path.name for path in Path("/proc/self/fd").iterdir()))) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        ballast = Ballast(10 * most)
        opened = os.open(os.devnull, os.O_RDONLY)
        os.close(opened)
        ballast.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
