"""Heads, their KV and FFN slices over three devices: the tokens of one process, whatever dies."""

import shutil
import signal

import pytest

from everserve.bench.load import Ask
from everserve.model.bundled import DEMO_MODEL
from tests.models import MAX_POSITIONS, VOCAB_SIZE, model_directory
from tests.process import cluster as c
from tests.process.cluster import Fault

ASKS = [
    Ask(
        prompt=[(7 * i + 3 * j) % VOCAB_SIZE for j in range(5 + 20 * i)],
        max_tokens=MAX_POSITIONS - 80,
        params={"temperature": 1.0, "seed": i} if i % 2 else {},
    )
    for i in range(4)
]
HOME, SHARDS = 0, 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A dense model with two KV heads, fewer than there are workers."""
    directory = tmp_path_factory.mktemp("llama3") / "llama3"
    shutil.copytree(model_directory("llama3"), directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory / name)
    return str(directory)


@pytest.fixture(scope="module")
def expected(start_server, directory):
    with start_server("--served-model-name", "it", "-tp", "1", model=directory) as one:
        one.model = "it"
        return c.run_all(one, ASKS)


@pytest.fixture(scope="module")
def server(start_server, directory):
    with start_server("--served-model-name", "it", "-tp", "3", *c.PATIENT, model=directory) as server:
        server.model = "it"
        yield server


def test_three_devices_answer_what_one_process_answers(server, expected):
    assert c.run_all(server, ASKS) == expected


@pytest.mark.parametrize(
    ("rank", "signum"),
    [(SHARDS, signal.SIGKILL), (HOME, signal.SIGKILL), (SHARDS, signal.SIGSTOP)],
    ids=["shard worker dies", "home dies", "shard worker is stopped"],
)
def test_streams_go_on(server, expected, rank, signum):
    """The KV of a shard worker outlives it: nothing is computed again."""
    c.wait_whole(server)
    before = c.metric(server, "vllm:num_preemptions_total")
    fault = Fault(server, rank, signum)
    streams = c.run_with(server, ASKS, lambda streams: any(stream.token_ids for stream in streams), fault)
    fault.assert_landed()
    c.assert_equal(streams, expected)
    if rank == SHARDS:
        assert c.metric(server, "vllm:num_preemptions_total") == before
    c.wait_whole(server)
