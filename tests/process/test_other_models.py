"""Clusters of other architectures: without experts, and with experts in some layers only."""

import functools
import shutil
import signal

import pytest

from everserve.model.bundled import DEMO_MODEL
from everserve_bench.load import Ask
from tests.support import cluster as c
from tests.support.cluster import Fault
from tests.support.models import MAX_POSITIONS, VOCAB_SIZE, model_directory

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

    @functools.cache
    def make(kind: str):
        directory = tmp_path_factory.mktemp(kind) / kind
        shutil.copytree(model_directory(kind), directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_MODEL / name, directory / name)
        return directory

    return make


@pytest.fixture(scope="module")
def alone(start_server, directory_of):
    """What one process answers."""

    @functools.cache
    def answers(kind: str, *flags: str) -> list[list[int]]:
        with start_server("--served-model-name", "it", *flags, model=str(directory_of(kind))) as one:
            one.model = "it"
            return c.run_all(one, ASKS)

    return answers


DIVIDED_FFN = ("--attention-workers", "2", "--expert-workers", "3", "--weights", "memory")


@pytest.mark.parametrize(
    ("kind", "flags", "victims", "one"),
    [
        pytest.param("llama3", ("--attention-workers", "2"), [0], (), marks=pytest.mark.long),
        pytest.param("llama3", DIVIDED_FFN, [3, 4], (), marks=pytest.mark.long),
        pytest.param(
            *("qwen3-moe-mixed", ("--attention-workers", "1", "--expert-workers", "2"), [1, 0], ()),
            marks=pytest.mark.long,
        ),
        ("mixtral", ("-tp", "3"), [4], ("-tp", "1")),
    ],
)
def test_a_cluster_survives_and_answers_what_one_process_answers(
    start_server, directory_of, alone, kind, flags, victims, one
):
    expected = alone(kind, *one)
    with start_server("--served-model-name", "it", *flags, model=str(directory_of(kind))) as server:
        server.model = "it"
        assert c.run_all(server, ASKS) == expected
        for rank in victims:
            fault = Fault(server, rank, signal.SIGKILL)
            streams = c.run_with(server, ASKS, lambda streams: any(stream.token_ids for stream in streams), fault)
            fault.assert_landed()
            c.assert_equal(streams, expected)
            c.wait_whole(server)
