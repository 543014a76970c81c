"""`everserve chaos`: the server that it starts."""

import pytest

from everserve.cli.chaos import _workers


@pytest.mark.parametrize(
    ("said", "flags"),
    [
        ((None, None, None, None, False), "--attention-workers 2 --expert-workers 2"),
        ((1, 0, None, None, False), "--attention-workers 1 --expert-workers 0"),
        ((None, None, 4, None, True), "--data-parallel-size 4 --enable-expert-parallel"),
        ((None, None, None, 3, False), "--tensor-parallel-size 3"),
    ],
)
def test_workers_of_its_server(said, flags):
    assert " ".join(_workers(*said)) == flags
