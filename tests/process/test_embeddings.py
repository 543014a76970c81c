"""Embeddings while processes die: each of a long list is the same number for number."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from everserve.procs.local_server import LocalServer
from tests.support import cluster as c
from tests.support.shared_servers import CLUSTER, SharedServers

TEXTS = [f"Chapter {n}. " + "It was a cold evening in November when " * (n % 24) for n in range(90)]


@pytest.fixture
def server(shared_servers: SharedServers) -> Iterator[LocalServer]:
    with shared_servers.lend(*CLUSTER) as server:
        yield server


def embed(server: LocalServer, **fields: Any) -> Any:
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": TEXTS, **fields}, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def is_running(server: LocalServer) -> bool:
    return sum(worker["requests"] or 0 for worker in c.cluster(server)["workers"]) > 8


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_workers_and_the_gateway_die(server: LocalServer) -> None:
    """Nothing is found in a cache that was filled without a death: the salts differ."""
    undisturbed = embed(server, cache_salt="undisturbed")
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(embed(server, cache_salt="disturbed")))
    asking.start()
    try:
        c.wait_until(lambda: is_running(server), 60, "embeddings that are computed")
        workers = c.cluster(server)["workers"]
        for role in ("attention", "expert"):
            kill(next(worker["pid"] for worker in workers if role in worker["roles"]))
        c.wait_until(lambda: c.metric(server, "everserve_failovers_total") >= 2, 60, "both failovers")
        c.wait_whole(server)
        kill(next(each["pid"] for each in c.cluster(server)["processes"] if each["name"] == "gateway"))
    finally:
        asking.join(240)
    assert found == [undisturbed]
