"""Heads, their KV and experts over three devices: the tokens of one process, whatever dies; and KV outlives it."""

import signal

import pytest

from tests.process import cluster as c
from tests.process.cluster import DECODE, Fault

HOME, SHARDS = 0, 4
LONG = c.asks(3, num_prompt=12, max_tokens=200)
LOST = 1  # a device, which has a home and a worker with heads


@pytest.fixture(scope="module")
def divided(start_server):
    """One cluster for all losses: it must be whole again after each."""
    with start_server("-tp", "3", "--enable-chaos", *c.PATIENT) as running:
        yield running
        assert running.process.poll() is None, running.log_text()
        assert "Traceback" not in running.log_text(), running.log_text()


@pytest.fixture
def whole(divided):
    c.wait_whole(divided)
    return divided


@pytest.fixture(scope="module")
def expected(server):
    """The right answers, by one process that has everything itself."""
    return c.run_all(server, DECODE)


@pytest.fixture(scope="module")
def expected_long(server):
    return c.run_all(server, LONG)


class Counters:
    """What has become of KV since this was made."""

    NAMES = ("kv_regained_tokens", "kv_lost_tokens", "kv_regained_bytes", "tokens_restored", "tokens_recomputed")

    def __init__(self, server) -> None:
        self._server, self._before = server, self._all(server)

    @classmethod
    def _all(cls, server) -> dict[str, float]:
        found = {name: c.metric(server, f"everserve_{name}_total") for name in cls.NAMES}
        return found | {"preemptions": c.metric(server, "vllm:num_preemptions_total")}

    def __getattr__(self, name: str) -> float:
        return self._all(self._server)[name] - self._before[name]


@pytest.mark.parametrize(
    ("rank", "signum"),
    [(SHARDS, signal.SIGKILL), (HOME, signal.SIGKILL), (SHARDS, signal.SIGSTOP)],
    ids=["shard worker dies", "home dies", "shard worker is stopped"],
)
def test_streams_go_on(whole, expected, rank, signum):
    """KV outlives both: that of a shard worker is found by its successor, that of a home's streams by other homes."""
    since, fault = Counters(whole), Fault(whole, rank, signum)
    streams = c.run_with(whole, DECODE, c.in_decode, fault)
    fault.assert_landed()
    c.assert_equal(streams, expected)
    assert since.preemptions == since.kv_lost_tokens == 0
    if rank == HOME:
        assert since.tokens_restored > 0 and since.tokens_restored > 4 * since.tokens_recomputed


def lose(server, gone: bool) -> None:
    answer = c.post(server, "/cluster/fault", {"device": LOST, "gone": gone})
    assert answer.status_code == 200, answer.text


def assert_kept(since: Counters) -> None:
    """Streams of the lost home were restored, all others regained what the lost heads had, but for the last tokens."""
    assert since.kv_regained_bytes > 0 and since.preemptions == 0
    assert since.kv_regained_tokens > 4 * since.kv_lost_tokens
    assert since.tokens_restored > 4 * since.tokens_recomputed


def test_kv_outlives_its_device(whole, expected_long):
    """Its pool is lost, its mirror is not. What the mirror lacked is computed again; most was in it."""
    since = Counters(whole)
    c.assert_equal(c.run_with(whole, LONG, c.in_decode, lambda: lose(whole, gone=False)), expected_long)
    assert_kept(since)
    c.wait_whole(whole)


def test_heads_move_with_their_kv_when_a_device_is_gone_and_when_it_returns(whole, expected_long):
    since = Counters(whole)
    c.assert_equal(c.run_with(whole, LONG, c.in_decode, lambda: lose(whole, gone=True)), expected_long)
    assert_kept(since)
    since = Counters(whole)

    def give_back() -> None:
        assert c.post(whole, "/cluster/return", {"device": LOST}).status_code == 200

    c.assert_equal(c.run_with(whole, LONG, c.in_decode, give_back), expected_long)
    c.wait_whole(whole)
    assert since.preemptions == since.kv_lost_tokens == 0
