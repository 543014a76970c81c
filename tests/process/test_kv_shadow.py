"""What is left of heads' KV when devices are lost: rebuilt from parity, or parked when there is no room for it."""

import signal

import pytest

from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from tests.process.test_tensor_parallel import LONG, SHARDS, Counters, lose
from tests.support import cluster as c
from tests.support.cluster import Fault


@pytest.fixture(scope="module")
def covered(start_server):
    """Three devices, each with the parity of the others."""
    with c.unharmed(start_server("-tp", "3", "--kv-shadow", "parity", "--enable-chaos", *c.PATIENT)) as running:
        yield running


@pytest.fixture(scope="module")
def expected_long(server):
    return c.run_all(server, LONG)


def test_kv_of_a_lost_device_is_rebuilt(covered, expected_long):
    """It comes back empty; then it goes for good, and what others keep by then is of use."""
    c.wait_whole(covered)
    kv = {one["failure"]: one["kv"] for one in c.cluster(covered)["survives"]}
    assert kv["any one device"] == "KV is rebuilt from parity"
    assert kv["any two devices"] == "KV that is lost is computed again"
    for gone in (False, True):
        since = Counters(covered)
        c.assert_equal(
            c.run_with(covered, LONG, c.in_decode, lambda gone=gone: lose(covered, gone=gone)), expected_long
        )
        # A stream may be computed again as a whole: parity is written behind the steps, and anew after each change.
        assert since.kv_regained_bytes > 0
        if not gone:
            c.wait_whole(covered)


# -- two of three devices are lost, with less memory than all streams need ------------------------

ASKS = c.asks(6, num_prompt=12, max_tokens=110)
BLOCK_SIZE = 16
BLOCKS_OF_STREAM = -(-(12 + 6 + 110) // BLOCK_SIZE)
BLOCKS_OF_HOME = 2 * BLOCKS_OF_STREAM + BLOCKS_OF_STREAM // 2  # enough for all streams on three homes, not on one
DEVICES = (1, 2)


@pytest.fixture(scope="module")
def small(start_server):
    """Heads and experts have places everywhere: one device can go on alone."""
    model = ModelConfig.from_directory(DEMO_MODEL)
    per_token = model.num_layers * 2 * model.num_kv_heads * model.head_size * 2
    kv_bytes = BLOCKS_OF_HOME * BLOCK_SIZE * per_token
    memory = ("--kv-cache-memory-bytes", str(kv_bytes), "--max-model-len", str(BLOCKS_OF_STREAM * BLOCK_SIZE))
    flags = ("-tp", "3", "--shadow-shards", "2", "--block-size", str(BLOCK_SIZE), "--no-enable-prefix-caching")
    with c.unharmed(start_server(*flags, *memory, "--enable-chaos", *c.PATIENT)) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server):
    return c.run_all(server, ASKS)


def test_streams_are_parked_while_memory_is_short_and_go_on(small, expected):
    c.wait_whole(small)
    told = {one["failure"]: (one["weights"], one["kv"]) for one in c.cluster(small)["survives"]}
    assert set(told.values()) == {("no stream waits for weights", "KV is restored")}

    def lose_two() -> None:
        for device in DEVICES:
            assert c.post(small, "/cluster/fault", {"device": device, "gone": True}).status_code == 200

    since = Counters(small)
    c.assert_equal(c.run_with(small, ASKS, c.in_decode, lose_two), expected)
    assert since.preemptions > 0 and since.kv_regained_bytes > 0
    assert since.tokens_restored > 4 * since.tokens_recomputed
    assert [device["state"] for device in c.cluster(small)["devices"]] == ["serving", "gone", "gone"]

    def give_back() -> None:
        for device in DEVICES:
            assert c.post(small, "/cluster/return", {"device": device}).status_code == 200

    c.assert_equal(c.run_with(small, ASKS, c.in_decode, give_back), expected)


def test_a_dead_worker_is_not_waited_for(small, expected):
    """Its heads are at other workers already, which fetch their KV out of its memory; and there is room for all."""
    c.wait_whole(small)
    since, fault = Counters(small), Fault(small, SHARDS, signal.SIGKILL)
    c.assert_equal(c.run_with(small, ASKS, c.in_decode, fault), expected)
    fault.assert_landed()
    assert since.preemptions == since.kv_lost_tokens == 0 and since.kv_regained_bytes > 0
