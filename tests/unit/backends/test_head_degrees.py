"""Logits have the same bits whatever the number of shard workers, and wherever heads and FFN shards are."""

import copy

import pytest
import torch

from everserve.errors import StepAbandoned
from everserve.model.config import ModelConfig
from everserve.plan.head_memory import can_divide_heads
from tests.support.batches import PagedSequences
from tests.support.families import FAMILIES, family_directory
from tests.support.in_process_heads import BLOCKS_PER_HOME, OPS, HeadWorld
from tests.support.models import model_directory, random_tokens

ROW_NORMS = {"olmo2", "olmo3", "olmoe", "minimax-m2"}  # no head can be computed alone
LATENT = {"deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite", "minicpm3", "youtu"}  # nor can these
WITH_HEADS = [name for name in FAMILIES if name not in ROW_NORMS | LATENT]
# sequence -> (from, to): a prompt; a chunk of another beside a decode; chunks; both decode
STEPS = [{0: (0, 33)}, {0: (33, 34), 1: (0, 7)}, {1: (7, 30), 0: (34, 35)}, {0: (35, 36), 1: (30, 31)}]


@pytest.fixture
def make_world():
    worlds = []

    def make(*args, **kwargs) -> HeadWorld:
        worlds.append(HeadWorld(*args, **kwargs))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


class Apart(PagedSequences):
    """Sequences of one home of a world."""

    def __init__(self, world: HeadWorld, index: int = 0) -> None:
        self.home = world.homes[index]
        self.decoder, self.block_size = world.decoder(), 16
        self.expert_io = self.home.experts
        self.kv_pool = Located(self.home.heads)
        first = self.home.rank * BLOCKS_PER_HOME
        self._free = [*range(first, first + BLOCKS_PER_HOME)]
        self._blocks, self._lengths = {}, {}

    def step(self, chunks):
        before = copy.deepcopy((self._blocks, self._lengths, self._free))
        self.expert_io.begin_step(1)
        try:
            return super().step(chunks)
        except StepAbandoned:
            self._blocks, self._lengths, self._free = before
            raise
        finally:
            self.expert_io.end_step()


class Located:
    """`PagedSequences` asks its pool where it is."""

    device = torch.device("cpu")

    def __init__(self, heads) -> None:
        self._heads = heads

    def __call__(self, *args):
        return self._heads(*args)


def together(directory) -> PagedSequences:
    """One process, with the same cut."""
    return PagedSequences(directory, OPS, tensor_parallel=True)


def chunk(step, home: int = 0):
    return {seq: random_tokens(64, seed=10 * home + seq)[a:b] for seq, (a, b) in step.items()}


def logits(sequences, step, home: int = 0) -> torch.Tensor:
    return torch.cat([*sequences.step(chunk(step, home)).values()])


@pytest.mark.parametrize("kind", ["qwen3-moe", "qwen3-moe-mixed", "mixtral", "qwen3", "llama-bias", "qwen2", "mistral"])
def test_any_degree_any_place(make_world, kind):
    directory = model_directory(kind, "float32")
    alone = together(directory)
    expected = [logits(alone, step) for step in STEPS]
    for num_workers in (1, 2, 3, 4, 5, 7, 8):
        sequences = Apart(make_world(directory, num_workers, seed=num_workers))
        for step, one in zip(STEPS, expected, strict=True):
            assert torch.equal(logits(sequences, step), one), f"{num_workers} workers, {step}"


@pytest.mark.parametrize("name", WITH_HEADS)
def test_heads_of_every_family(make_world, name):
    """Windows, sinks, biases, layers without rope, norms: whatever heads have."""
    directory = family_directory(name)
    alone = together(directory)
    sequences = Apart(make_world(directory, 3, seed=4))
    for step in STEPS:
        assert torch.equal(logits(sequences, step), logits(alone, step)), step


def test_heads_that_share_a_norm_or_a_row_stay_at_home():
    for name in FAMILIES:
        model = ModelConfig.from_directory(family_directory(name))
        assert can_divide_heads(model, "cpu") is (name in WITH_HEADS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_any_width(make_world, dtype):
    directory = model_directory("qwen3-moe", dtype)
    alone = together(directory)
    expected = [logits(alone, step) for step in STEPS]
    sequences = Apart(make_world(directory, 3, seed=3))
    assert all(torch.equal(logits(sequences, step), one) for step, one in zip(STEPS, expected, strict=True))


def test_two_homes_at_once(make_world):
    """The rows of both are computed in one batch, each with its own page, blocks and KV."""
    directory = model_directory("qwen3-moe", "float32")
    world = make_world(directory, 3, num_homes=2, seed=5)
    homes = [Apart(world, index) for index in (0, 1)]
    alone = [together(directory) for _ in homes]
    for step in STEPS:
        results = {}

        def second(step=step, results=results) -> None:
            results[1] = logits(homes[1], step, home=1)

        world.homes[0].before_others = second
        results[0] = logits(homes[0], step, home=0)
        for index, sequences in enumerate(alone):
            assert torch.equal(results[index], logits(sequences, step, home=index))
    assert any(sorted(ranks) == [0, 1] for worker in world.workers for _, ranks in worker.batches)
