"""Real servers for all tests, and which process runs which of them."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from everserve.procs.local_server import LocalServer

with contextlib.suppress(ImportError):  # a machine with a GPU need not have it
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is, and nothing of what is tested.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

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


@pytest.fixture(scope="session")
def shared_servers() -> Iterator[Any]:
    """`with shared_servers.lend("--flag", ...) as server`: one that other files use too (shared_servers.py)."""
    from tests.support.shared_servers import SharedServers  # noqa: PLC0415 (clients, which not every machine with a GPU has)

    servers = SharedServers()
    yield servers
    servers.close()


class PytestXdist:
    """Only known to pytest-xdist, which need not be there."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: object) -> object:
        from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415

        from tests.support.shared_servers import group_of  # noqa: PLC0415

        class GroupScheduling(LoadFileScheduling):  # type: ignore[misc]
            """A process runs a file, or the files that share a server."""

            def _split_scope(self, nodeid: str) -> str:
                return group_of(nodeid)

        return GroupScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", default="no") == "loadfile":
        config.pluginmanager.register(PytestXdist())


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """What was imported stays for good. Looking through it at every full collection of garbage takes half a second."""
    gc.collect()
    gc.freeze()
