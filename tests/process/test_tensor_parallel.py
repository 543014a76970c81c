"""Heads, their KV and experts over three devices: the tokens of one process, whatever dies."""

import signal

import pytest

from tests.process import cluster as c
from tests.process.cluster import DECODE, Fault

HOME, SHARDS = 0, 4
LONG = c.asks(3, num_prompt=12, max_tokens=300)


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


def num_computed_again(server) -> float:
    return c.metric(server, "vllm:num_preemptions_total")


@pytest.mark.parametrize(
    ("rank", "signum"),
    [(SHARDS, signal.SIGKILL), (HOME, signal.SIGKILL), (SHARDS, signal.SIGSTOP)],
    ids=["shard worker dies", "home dies", "shard worker is stopped"],
)
def test_streams_go_on(whole, expected, rank, signum):
    """The KV of a shard worker outlives it: nothing is computed again. (Streams of a dead home are, elsewhere.)"""
    before, fault = num_computed_again(whole), Fault(whole, rank, signum)
    streams = c.run_with(whole, DECODE, c.in_decode, fault)
    fault.assert_landed()
    c.assert_equal(streams, expected)
    assert num_computed_again(whole) == before


def test_a_lost_device_takes_kv_with_it(whole, server):
    """Every stream needs every head: all are computed again, and are what they would have been."""
    before, expected = num_computed_again(whole), c.run_all(server, LONG)

    def lose() -> None:
        answer = c.post(whole, "/cluster/fault", {"device": 1, "gone": False})
        assert answer.status_code == 200, answer.text

    c.assert_equal(c.run_with(whole, LONG, c.in_decode, lose), expected)
    assert num_computed_again(whole) > before
    c.wait_whole(whole)
