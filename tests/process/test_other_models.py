"""Clusters of other architectures: without experts, and with experts in some layers only."""

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
        prompt=[(7 * i + 3 * j) % VOCAB_SIZE for j in range(5 + i)],
        max_tokens=MAX_POSITIONS - 20,
        params={"temperature": 1.0, "seed": i} if i % 2 else {},
    )
    for i in range(4)
]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """A random model of this kind, with the bundled model's tokenizer: prompts are token ids anyway."""

    def make(kind: str):
        directory = tmp_path_factory.mktemp(kind) / kind
        shutil.copytree(model_directory(kind), directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_MODEL / name, directory / name)
        return directory

    return make


@pytest.mark.parametrize(
    ("kind", "flags", "victims"),
    [
        ("llama3", ("--attention-workers", "2"), [0]),
        ("qwen3-moe-mixed", ("--attention-workers", "1", "--expert-workers", "2"), [1, 0]),
    ],
)
def test_a_cluster_survives_and_answers_what_one_process_answers(start_server, directory_of, kind, flags, victims):
    directory = str(directory_of(kind))
    with start_server("--served-model-name", "it", model=directory) as one:
        one.model = "it"
        expected = c.run_all(one, ASKS)
    with start_server("--served-model-name", "it", *flags, model=directory) as server:
        server.model = "it"
        assert c.run_all(server, ASKS) == expected
        for rank in victims:
            fault = Fault(server, rank, signal.SIGKILL)
            streams = c.run_with(server, ASKS, lambda streams: any(stream.token_ids for stream in streams), fault)
            fault.assert_landed()
            c.assert_equal(streams, expected)
            c.wait_whole(server)
