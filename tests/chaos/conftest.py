"""A real server for the checker to look at."""

import pytest

from everserve.procs.local_server import LocalServer


@pytest.fixture(scope="module")
def server():
    """One process that serves the bundled model, with prompts that are soon computed; nothing is done to it."""
    with LocalServer("demo", "--enable-chaos", "--max-model-len", "512") as running:
        yield running
