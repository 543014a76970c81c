"""Real servers for all tests."""

import pytest
import torch

from everserve.procs.local_server import LocalServer

# PyTorch's own threads wait for each other without sleeping: many times slower where tests share the cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def start_server():
    """A factory: `with start_server("--flag", ...) as server` serves the bundled model on a free port."""

    def start(*flags: str, model: str = "demo") -> LocalServer:
        return LocalServer(model, *flags)

    return start


@pytest.fixture(scope="session")
def server(start_server):
    """One server with default flags for all tests that only talk to it."""
    with start_server() as running:
        yield running
        assert running.process is not None and running.process.poll() is None, running.log_text()
        assert "Traceback" not in running.log_text(), running.log_text()
