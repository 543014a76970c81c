"""The whole cluster on one GPU: workers share it, die, are replaced; clients see the tokens that they would have seen.

The process that runs the tests never uses CUDA itself.
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from everserve.bench.load import Ask, send_all
from everserve.client import Stream
from everserve.runtime.cuda.driver import is_available
from everserve.runtime.local_server import LocalServer
from tests.process.cluster import wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_available(), reason="needs an NVIDIA GPU and its driver"),
    pytest.mark.timeout(300),
]
ASKS = [
    Ask([(7 * i + 13 * j) % 4000 + 5 for j in range(40 + 9 * i)], 300, {"seed": i, "temperature": 0.8} if i % 2 else {})
    for i in range(12)
]


@contextmanager
def cluster(attention: int, expert: int, *flags: str) -> Iterator[LocalServer]:
    workers = ["--attention-workers", str(attention), *(["--expert-workers", str(expert)] if expert else [])]
    with LocalServer("demo", "--device", "cuda", "--enable-chaos", *workers, *flags, start_timeout_s=180) as server:
        yield server


def run(server: LocalServer) -> list[Stream]:
    streams = asyncio.run(send_all(server, ASKS))
    assert not [stream.error for stream in streams if stream.error]
    return streams


def tokens(streams: list[Stream]) -> list[list[int]]:
    return [stream.token_ids for stream in streams]


def kill_under_load(server: LocalServer, rank: int) -> list[Stream]:
    async def both() -> list[Stream]:
        work = asyncio.create_task(send_all(server, ASKS))
        await asyncio.sleep(0.15)
        os.kill(workers(server)[rank]["pid"], signal.SIGKILL)
        return await work

    streams = asyncio.run(both())
    assert not [stream.error for stream in streams if stream.error]
    wait_until(lambda: all(worker["state"] == "ready" for worker in workers(server).values()), 60, "full strength")
    return streams


def workers(server: LocalServer) -> dict[int, dict]:
    return {worker["rank"]: worker for worker in httpx.get(f"{server.url}/cluster").json()["workers"]}


def captures(server: LocalServer) -> dict[str, float]:
    found = re.findall(r'everserve_graph_captures\{rank="(\d+)"\} (\S+)', httpx.get(f"{server.url}/metrics").text)
    return {rank: float(number) for rank, number in found}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with cluster(1, 0) as server:
        return tokens(run(server))


@pytest.mark.parametrize(("attention", "expert"), [(1, 1), (2, 2), (3, 3)])
def test_tokens_do_not_depend_on_who_computes_them(attention: int, expert: int, expected: list[list[int]]) -> None:
    with cluster(attention, expert) as server:
        assert tokens(run(server)) == expected


def test_every_death_is_survived_exactly_and_nobody_else_is_harmed(expected: list[list[int]]) -> None:
    """Killed one after the other under load; the others are the processes that they were, and capture nothing again."""
    with cluster(2, 2) as server:
        assert tokens(run(server)) == expected
        for rank in (2, 0, 3, 1, 2, 3):
            before, captured = workers(server), captures(server)
            assert tokens(kill_under_load(server, rank)) == expected
            after = workers(server)
            for other in before.keys() - {rank}:
                assert after[other]["pid"] == before[other]["pid"], f"the death of {rank} took {other} along"
                assert captures(server).get(str(other)) == captured.get(str(other))
            time.sleep(1)
