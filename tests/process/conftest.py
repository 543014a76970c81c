"""What most files of process tests have: one cluster with the file's FLAGS, whole before each test, and right answers.

A file that needs something else has a fixture of the same name.
"""

from collections.abc import Iterator

import pytest

from everserve.procs.local_server import LocalServer
from tests.support import cluster as c


@pytest.fixture(scope="module")
def shared(request, start_server) -> Iterator[LocalServer]:
    """One cluster for all faults of a file: it must be whole again after each."""
    with c.unharmed(start_server(*request.module.FLAGS)) as running:
        yield running


@pytest.fixture
def whole(shared) -> LocalServer:
    c.wait_whole(shared)
    return shared


@pytest.fixture(scope="module")
def expected(server) -> list[list[int]]:
    """The right answers, by one process that has everything itself."""
    return c.right_answers(server, c.DECODE)
