"""Logits have the same bits whatever the number of workers, and wherever heads and FFN shards are: prompts, chunks of
them, and decoding."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from everserve.backends.cuda.lanes.local_experts import LocalCudaExperts
from everserve.backends.cuda.ops.experts import ExpertArena
from everserve.backends.cuda.ops.ops import CudaOps
from everserve.backends.cuda.staging import Staging
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.decoder import Decoder
from everserve.model.random_weights import RandomCheckpoint
from tests.kernels import toy_heads
from tests.kernels.test_model import Copied, Model
from tests.kernels.toy_heads import HeadWorld
from tests.support.models import model_directory, random_tokens
from tests.support.specs import with_layers, with_mixers

pytestmark = pytest.mark.long  # the interpreter takes its time; test_heads.py has the kernels alone
# Sequence -> how many tokens: a prompt; another one beside a decode.
STEPS = [{0: 3}, {0: 1, 1: 2}]
TOKENS = {seq: random_tokens(8, seed=seq) for seq in (0, 1)}


@cache
def parts(kind: str, device: torch.device) -> tuple[ModelConfig, Copied]:
    """A model and its weights. `many-heads`: three KV heads of two query heads."""
    source = "llama3" if kind == "many-heads" else kind
    directory = model_directory(source, "bfloat16")
    config = replace(ModelConfig.from_directory(str(directory)), tensor_parallel=True)
    checkpoint = Checkpoint.open(str(directory))
    if kind == "many-heads":
        config = with_layers(config, config.layers[0])
        config = with_mixers(config, num_heads=6, num_kv_heads=3, head_size=16, rotary_size=16, scale=0.25)
        checkpoint = RandomCheckpoint(Path(directory), config, device)
    return config, Copied(config, checkpoint, "bfloat16", device)


class Whole(Model):
    """All in one process."""

    def __init__(self, kind: str, device: torch.device) -> None:
        """Instead of the parent's: the same sizes as those of homes."""
        config, weights = parts(kind, device)
        self.ops = CudaOps(device, max_num_seqs=3, max_model_len=toy_heads.MAX_LEN, one_by_one=True)
        self.decoder = Decoder(config, weights, self.ops, toy_heads.MAX_LEN)
        self.experts = LocalCudaExperts(
            self.ops, _arena(config, weights, device), config.call_layers, config.max_shards
        )
        shape = self.decoder.kv_shape(toy_heads.BLOCKS_PER_HOME, toy_heads.BLOCK_SIZE)
        self.pool = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
        group = config.num_heads // config.num_kv_heads
        sizes = (toy_heads.MAX_ROWS, toy_heads.MAX_SEQS, toy_heads.BLOCKS_PER_HOME, toy_heads.BLOCK_SIZE)
        self.staging = Staging(*sizes, group, True, device, launches_ahead=False)
        self.chosen_L = torch.zeros(toy_heads.MAX_SEQS, dtype=torch.int32, device=device)
        self.lengths, self.blocks, self.num_taken = {}, {}, 0


def _arena(config: ModelConfig, weights: Copied, device: torch.device) -> ExpertArena:
    shape = (len(config.cuts) * config.max_shards, 3, config.cuts[0].shard_size, config.hidden_size)
    arena = ExpertArena.of_experts(
        torch.empty(shape, dtype=torch.bfloat16, device=device), len(config.cuts), config.max_shards
    )
    for index, cut in enumerate(config.cuts):
        for shard in range(cut.num_shards):
            arena.fill(index, shard, *weights.shard(weights.layout.shard(cut.layer, shard)))
    return arena


def logits(step, steps: list[dict[int, int]] = STEPS) -> list[Tensor]:
    done, found = {0: 0, 1: 0}, []
    for sizes in steps:
        chunks = {seq: TOKENS[seq][done[seq] : done[seq] + num] for seq, num in sizes.items()}
        found += step(chunks).values()
        done.update({seq: done[seq] + num for seq, num in sizes.items()})
    return found


@cache
def expected(kind: str, device: torch.device) -> list[Tensor]:
    return logits(Whole(kind, device).step)


CASES = [
    ("many-heads", 1, 0), ("many-heads", 2, 1), ("many-heads", 3, 2), ("many-heads", 7, 3), ("qwen3", 2, 4),
    ("mixtral", 3, 5),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "num_workers", "seed"), CASES)
def test_bits_do_not_depend_on_the_number_of_workers(kind, num_workers, seed, device) -> None:
    world = HeadWorld(*parts(kind, device), device, num_workers=num_workers, seed=seed)
    for found, wanted in zip(logits(world.homes[0].step), expected(kind, device), strict=True):
        assert torch.equal(found, wanted)


def test_homes_share_pools_and_batches(device) -> None:
    """A second home's rows and blocks are others, in the same pools."""
    world = HeadWorld(*parts("many-heads", device), device, num_workers=2, num_homes=2, seed=1)
    for home in world.homes:
        for found, wanted in zip(logits(home.step), expected("many-heads", device), strict=True):
            assert torch.equal(found, wanted)
