"""All clients at once, twice: with nothing happening, and while an attention worker, an expert worker and the gateway
die. Those that are not installed are skipped: some cannot live with our pins (CONTRIBUTING.md)."""

import importlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from everserve.procs.local_server import LocalServer
from tests.clients.scenarios import SCENARIOS
from tests.support import cluster as c
from tests.support.shared_servers import TOOLS, SharedServers


def missing(name: str) -> str:
    """Why this client cannot be used here; empty if it can."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        return f"not installed: {error}"
    return ""


MISSING = {name: missing(name) for name in SCENARIOS}


@pytest.fixture(scope="module")
def server(shared_servers: SharedServers) -> Iterator[LocalServer]:
    with shared_servers.lend(*TOOLS) as server:
        yield server


def run_all(server: LocalServer) -> dict[str, "Future[Any]"]:
    """Each client in a thread of its own."""
    names = [name for name, why in MISSING.items() if not why]
    pool = ThreadPoolExecutor(max(1, len(names)))
    futures = {name: pool.submit(SCENARIOS[name], server.url, server.model) for name in names}
    pool.shutdown(wait=False)
    return futures


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def hurt(server: LocalServer, rest: threading.Event) -> int:
    """Kills, each when the one before is healed and clients wait for tokens, as long as there are any."""
    num_kills = 0
    for role in ("attention", "gateway", "expert"):
        c.wait_until(lambda: rest.is_set() or c.metric(server, "vllm:num_requests_running") > 0, 120, "a request")
        if rest.is_set():
            break
        view = c.cluster(server)
        if role == "gateway":
            kill(next(process["pid"] for process in view["processes"] if process["name"] == role))
        else:
            workers = [worker for worker in view["workers"] if role in worker["roles"]]
            kill(max(workers, key=lambda worker: worker["requests"] or 0)["pid"])
        num_kills += 1
        c.wait_whole(server)
    return num_kills


@pytest.fixture(scope="module")
def found(server: LocalServer) -> dict[str, tuple["Future[Any]", "Future[Any]"]]:
    """What each client got without and with kills."""
    quiet = run_all(server)
    for future in quiet.values():
        future.exception()
    hurt_futures, over = run_all(server), threading.Event()

    def wait() -> None:
        for future in hurt_futures.values():
            future.exception()
        over.set()

    threading.Thread(target=wait).start()
    assert hurt(server, over) >= 2 or not quiet, "nothing was killed while clients waited"
    over.wait(240)
    return {name: (quiet[name], hurt_futures[name]) for name in quiet}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_as_if_nothing_had_died(name: str, request: pytest.FixtureRequest) -> None:
    if MISSING[name]:
        pytest.skip(MISSING[name])
    quiet, hurt = request.getfixturevalue("found")[name]
    assert quiet.result() == hurt.result(240)
