"""The server of a benchmark, as a real process."""

import contextlib

import pytest

from everserve.errors import UserError
from everserve_bench.instance import Instance


def test_a_server_that_refuses_its_flags_says_why_in_one_line():
    with pytest.raises(UserError) as refused, contextlib.closing(Instance("demo", ("--detect-ms", "1"))):
        pass
    assert str(refused.value) == "--detect-ms 1: choose 0 or 20 to 60000"
