"""The whole cluster on one GPU: workers share it, die, are replaced; clients see the tokens that they would have seen.

The process that runs the tests never uses CUDA itself.
"""

import asyncio
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from everserve.client import Stream
from everserve.procs.local_server import LocalServer
from everserve_bench.load import Ask, send_all
from tests.gpu.needs import SERVER
from tests.support import cluster as c

pytestmark = [*SERVER, pytest.mark.timeout(300)]
ASKS = [
    Ask([(7 * i + 13 * j) % 4000 + 5 for j in range(40 + 9 * i)], 300, {"seed": i, "temperature": 0.8} if i % 2 else {})
    for i in range(12)
]
LONG_ASKS = [replace(ask, max_tokens=3000) for ask in ASKS[:8]]


@contextmanager
def cluster(attention: int, expert: int, *flags: str) -> Iterator[LocalServer]:
    workers = ["--attention-workers", str(attention), *(["--expert-workers", str(expert)] if expert else [])]
    with LocalServer("demo", "--device", "cuda", "--enable-chaos", *workers, *flags) as server:
        yield server


def run(server: LocalServer, asks: list[Ask] = ASKS) -> list[Stream]:
    streams = asyncio.run(send_all(server, asks))
    assert not [stream.error for stream in streams if stream.error]
    return streams


def tokens(streams: list[Stream]) -> list[list[int]]:
    return [stream.token_ids for stream in streams]


def kill_under_load(server: LocalServer, rank: int, asks: list[Ask] = ASKS) -> list[Stream]:
    """In the middle of all streams; back at full strength afterwards."""
    fault = c.Fault(server, rank, signal.SIGKILL)
    streams = c.run_with(server, asks, c.in_decode, fault)
    assert not [stream.error for stream in streams if stream.error]
    fault.assert_landed()
    c.wait_until(lambda: c.is_whole(server), 60, "full strength")
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
        # A worker may die when no row is on its way to it; what is said to be sent again is counted.
        if any(event["event"] == "rows_replayed" for event in server.events()):
            c.wait_until(lambda: c.metric(server, "everserve_replayed_rows_total") > 0, 10, "the counter")


@pytest.mark.parametrize("kv_log", ["anchor", "mirror"])
@pytest.mark.parametrize(("attention", "expert"), [(1, 1), (2, 2), (2, 0)])
def test_streams_go_on_from_the_log(attention: int, expert: int, kv_log: str, expected: list[list[int]]) -> None:
    """In another worker, or in the successor of the one that died, which has its pool with `anchor`; twice, since the
    second time what dies has restored streams itself."""
    with cluster(attention, expert, "--kv-log", kv_log, "--kv-cache-memory-bytes", str(1 << 30)) as server:
        assert tokens(run(server)) == expected
        for rank in (0, attention - 1):
            before, num_resumed = c.metric(server, "everserve_tokens_restored_total"), count(server, "request_resumed")
            assert tokens(kill_under_load(server, rank)) == expected
            if count(server, "request_resumed") > num_resumed:  # its streams may have ended just before it died
                assert c.metric(server, "everserve_tokens_restored_total") > before
        assert count(server, "request_resumed")
        assert "Traceback" not in server.log_text(), server.log_text()


def test_successors_join_in_the_middle_of_streams() -> None:
    """Both ends of a new lane begin to use it when they like, and nothing that was sent is lost."""
    with cluster(2, 2, "--kv-log", "anchor", "--kv-cache-memory-bytes", str(1 << 30)) as server:
        undisturbed = tokens(run(server, LONG_ASKS))
        for rank in (2, 0, 3, 1):
            num_before = num_ready(server, rank)
            streams = kill_under_load(server, rank, LONG_ASKS)
            assert tokens(streams) == undisturbed
            assert num_ready(server, rank, until_s=min(stream.arrivals_s[-1] for stream in streams)) > num_before


def test_logprobs_of_a_prompt_with_more_rows_than_streams() -> None:
    """Its logits are computed beside the graph."""
    prompt = [(7 * i) % 4000 + 5 for i in range(600)]
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "echo": True, "logprobs": 0, "temperature": 0}
    with cluster(1, 1) as server:
        before = workers(server)
        first, second = (httpx.post(f"{server.url}/v1/completions", json=body, timeout=120) for _ in range(2))
        assert first.status_code == 200, first.text
        scores = first.json()["choices"][0]["logprobs"]["token_logprobs"]
        assert len(scores) == 604 and scores[0] is None and all(score <= 0 for score in scores[1:])
        assert second.json()["choices"] == first.json()["choices"]
        assert {rank: worker["pid"] for rank, worker in workers(server).items()} == {
            rank: worker["pid"] for rank, worker in before.items()
        }


def count(server: LocalServer, name: str) -> int:
    return sum(event["event"] == name for event in server.events())


def num_ready(server: LocalServer, rank: int, until_s: float = float("inf")) -> int:
    """How often this seat has had a worker that was ready, by then."""
    ready = [event for event in server.events(f"worker-{rank}") if event["event"] == "worker_became_ready"]
    return sum(event["at_s"] < until_s for event in ready)
