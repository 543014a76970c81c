"""Half of all attention workers and half of all expert workers die at the same instant, on one GPU, again and again.

Experts are left without a place, so the step of every survivor stops in the middle of a layer and is abandoned, while
streams of the dead ones arrive, greedy and sampled ones mixed, some of which have a token to compute again. If a stream
differs, the assertion says which one, from which token on, and where it was.
"""

import os
import signal
from collections.abc import Iterator

import pytest

from everserve.client import Stream
from everserve.procs.local_server import LocalServer
from everserve_bench.analysis import compare
from tests.gpu.needs import SERVER
from tests.gpu.test_cluster import ASKS, cluster, run, tokens
from tests.support import cluster as c

pytestmark = [*SERVER, pytest.mark.timeout(300)]
FLAGS = (
    *("--devices", "4", "--shadow-experts", "4", "--map-experts", "on", "--kv-log", "mirror"),
    *("--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(1 << 29)),
)
VICTIMS = (0, 1, 4, 5)  # two attention workers of four, and two expert workers of four
_ABOUT_STREAMS = ("request_resumed", "stream_restored", "stream_diverged")


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalServer]:
    with cluster(4, 4, *FLAGS) as server:
        yield server
        assert "Traceback" not in server.log_text(), server.log_text()


@pytest.fixture(scope="module")
def expected(shared: LocalServer) -> list[list[int]]:
    return tokens(run(shared))


def have(num_tokens: int):
    """A moment in the middle of all streams: another one each time, since it decides where in a step workers die."""

    def check(streams: list[Stream]) -> bool:
        return all(len(stream.token_ids) >= num_tokens for stream in streams)

    return check


def differences(server: LocalServer, streams: list[Stream], expected: list[list[int]]) -> list[str]:
    found = []
    for i, (stream, right) in enumerate(zip(streams, expected, strict=True)):
        verdict = compare(stream.token_ids, right)
        if not verdict.is_exact:
            events = [e for e in server.events() if str(e.get("request_id", "")).startswith(stream.id)]
            history = [e for e in events if e["event"] in _ABOUT_STREAMS]
            first = next(
                (n for n, pair in enumerate(zip(stream.token_ids, right, strict=False)) if len({*pair}) > 1), None
            )
            found.append(f"{i}, {ASKS[i].params or 'greedy'}: {verdict}, from token {first} on, {history}")
    return found


@pytest.mark.parametrize("num_tokens", range(10, 90, 10))
def test_streams_go_on_exactly(shared: LocalServer, expected: list[list[int]], num_tokens: int) -> None:
    c.wait_until(lambda: c.is_whole(shared), 60, "full strength")
    pids = [c.worker(shared, rank)["pid"] for rank in VICTIMS]

    def kill_all() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    streams = c.run_with(shared, ASKS, have(num_tokens), kill_all)
    assert not [stream.error for stream in streams if stream.error]
    assert not differences(shared, streams, expected)
