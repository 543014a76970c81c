"""A model that is divided over devices loses some for good: survivors take over heads and slices, with less memory for
KV than before; the devices come back; and every stream is what it would have been."""

import pytest

from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.tables.survival import Kv, Weights
from tests.support import cluster as c

pytestmark = pytest.mark.long
NUM_DEVICES = 3
ASKS = c.asks(9, num_prompt=12, max_tokens=140)
BLOCK_SIZE = 16
BLOCKS_OF_STREAM = -(-(12 + 9 + 140) // BLOCK_SIZE)
BLOCKS_OF_HOME = 3 * BLOCKS_OF_STREAM  # enough for all streams on three homes, and too few on two


def kv_bytes() -> int:
    model = ModelConfig.from_directory(DEMO_MODEL)
    item_bytes = 4 if model.dtype == "float32" else 2
    per_token = model.num_layers * 2 * model.num_kv_heads * model.head_size * item_bytes
    return BLOCKS_OF_HOME * BLOCK_SIZE * per_token


@pytest.fixture(scope="module")
def divided(start_server):
    memory = ("--kv-cache-memory-bytes", str(kv_bytes()), "--max-model-len", str(BLOCKS_OF_STREAM * BLOCK_SIZE))
    flags = ("-tp", str(NUM_DEVICES), "--block-size", str(BLOCK_SIZE), "--no-enable-prefix-caching", *memory)
    with c.unharmed(start_server(*flags, "--enable-chaos", *c.PATIENT)) as running:
        c.wait_whole(running)
        yield running


@pytest.fixture(scope="module")
def expected(server):
    """The right answers, by one process that has everything itself."""
    return c.right_answers(server, ASKS)


def survives(server) -> dict[str, tuple[str, str]]:
    return {one["failure"]: (one["weights"], one["kv"]) for one in c.cluster(server)["survives"]}


def test_what_is_survived_is_told(divided):
    told = survives(divided)
    assert told["any one process"][0] == Weights.SUCCESSOR
    assert told["any one device"][0] == Weights.LOADED and told["any two devices"][0] == Weights.RETURN
    assert {kv for _, kv in told.values()} <= set(Kv)
    assert f"survived: any one device: {Weights.LOADED}" in divided.log_text()


def test_survivors_serve_everything_with_less_memory(divided, expected):
    """Streams that do not fit any more wait, and are computed again; none fails."""

    def lose() -> None:
        assert c.post(divided, "/cluster/fault", {"device": 1, "gone": True}).status_code == 200

    streams = c.run_with(divided, ASKS, c.in_decode, lose)
    c.assert_equal(streams, expected)
    told = c.cluster(divided)
    assert [device["state"] for device in told["devices"]] == ["serving", "gone", "serving"]
    assert not told["violations"] and told["experts_without_place"] == 0
    c.wait_until(lambda: survives(divided)["any one device"][0] == Weights.RETURN, what="the view of what is left")


def test_they_come_back(divided, expected):
    """Under streams, and then everything is where it was meant to be."""

    def give_back() -> None:
        assert c.post(divided, "/cluster/return", {"device": 1}).status_code == 200

    c.assert_equal(c.run_with(divided, ASKS, c.in_decode, give_back), expected)
    c.wait_whole(divided)
    c.wait_until(lambda: survives(divided)["any one device"][0] == Weights.LOADED, what="full strength")
