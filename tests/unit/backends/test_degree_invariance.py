"""The bits of a stream do not depend on how many workers compute its FFNs, nor on which: real lanes, one process."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from everserve.backends.cpu.lane import LaneShape
from everserve.backends.cpu.ops import NativeOps
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.expert_half import ExpertHalf
from everserve.plan.routing import make_routes
from everserve.plan.shards import Spread, place_shards
from everserve.tables.calls import Call
from everserve.tables.ids import Epoch, Rank
from everserve.tables.placement import Placement, SeatExperts
from everserve.tables.slots import EMPTY
from tests.support.batches import PagedSequences
from tests.support.held_slots import held
from tests.support.in_process_experts import Fault, MemoryExperts
from tests.support.models import model_directory, random_tokens

DEGREES = (1, 2, 3, 4, 5, 7, 8, 11)  # 11: more than there are slices in a layer
TOKENS = random_tokens(23, seed=4)
PREFILL, CHUNKS, DECODE = (23,), (9, 1, 13), (20, 1, 1, 1)
# kind, dtype, and whether everything is to be divided: experts are cut, and dense layers of MoE models cross the seam
MODELS = [
    ("llama3", "float32", False),
    ("llama3", "float16", True),
    ("qwen3", "bfloat16", True),
    ("qwen2", "float32", True),
    ("mistral", "bfloat16", True),
    ("mixtral", "float32", True),
    ("qwen3-moe", "bfloat16", False),
    ("qwen3-moe-mixed", "float32", True),
]
OPS = NativeOps()


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def spread(calls: Sequence[Call], num: int, seed: int) -> Placement:
    """As a server begins, or in any other way."""
    ranks = [Rank(1 + i) for i in range(num)]
    if seed < len(Spread):
        return place_shards(calls, ranks, None, [*Spread][seed])
    chance = random.Random(seed)
    active: list[list[tuple[int, ...]]] = [[] for _ in ranks]
    for call in calls:
        owners = [chance.sample(range(num), chance.randint(1, min(num, 3))) for _ in range(call.num_shards)]
        for i in range(num):
            mine = [shard for shard, ranks_of in enumerate(owners) if i in ranks_of]
            active[i].append(tuple(chance.sample(mine, len(mine))))
    seats = [
        SeatExperts(rank=r, active=tuple(a), shadows=((),) * len(calls)) for r, a in zip(ranks, active, strict=True)
    ]
    return Placement(calls=tuple(calls), seats=tuple(seats))


@contextmanager
def divided(
    model: PagedSequences, directory: str, dtype: str, placement: Placement, faults=None
) -> Iterator[MemoryExperts]:
    """The model, with its FFNs in other workers."""
    config, checkpoint = model.decoder.config, Checkpoint.open(directory)
    cluster = MemoryExperts(LaneShape.of(config, len(TOKENS)), config.call_layers, config.max_shards)
    have = {seat.rank: held(placement, seat.rank, placement.slots_by_call) for seat in placement.seats}
    for rank, slots in have.items():
        half = ExpertHalf(config, checkpoint, OPS, [max(len(one), 1) for one in slots.experts], dtype)
        for layer, experts in zip(config.call_layers, slots.experts, strict=True):
            for slot, expert in enumerate(experts):
                if expert != EMPTY:
                    half.load(layer, expert, slot)
        cluster.add(rank, half, (faults or {}).get(rank))
    cluster.peers.use(make_routes(Epoch(1), placement, have, [*have]))
    local, model.expert_io = model.expert_io, cluster.remote_experts(OPS)
    yield cluster
    model.expert_io = local
    cluster.close()


def logits(model: PagedSequences, seq: int, sizes: Sequence[int]) -> Tensor:
    """Of all tokens, computed in steps of these sizes."""
    found, first = [], 0
    for size in sizes:
        found.append(model.step({seq: TOKENS[first : first + size]})[seq])
        first += size
    return torch.cat(found)


@pytest.mark.parametrize(("kind", "dtype", "tensor_parallel"), MODELS)
def test_logits_have_the_same_bits_at_every_degree(kind: str, dtype: str, tensor_parallel: bool) -> None:
    directory = str(model_directory(kind, dtype))
    model = PagedSequences(directory, OPS, num_blocks=256, tensor_parallel=tensor_parallel)
    expected = logits(model, 0, PREFILL)
    assert torch.equal(logits(model, 1, CHUNKS), expected)
    seq = 2
    calls = [cut.call for cut in model.decoder.config.cuts]
    for num in DEGREES:
        for seed, sizes in ((2, PREFILL), (1, DECODE), (0, CHUNKS), (10 * num, PREFILL), (10 * num + 1, DECODE)):
            with divided(model, directory, dtype, spread(calls, num, seed)):
                assert torch.equal(logits(model, seq, sizes), expected), (num, seed, sizes)
            seq += 1


@pytest.mark.parametrize("kind", ["llama3", "mixtral"])
def test_a_worker_that_dies_in_the_middle_changes_no_bit(kind: str) -> None:
    directory = str(model_directory(kind, "float32"))
    model = PagedSequences(directory, OPS, tensor_parallel=True)
    expected = logits(model, 0, DECODE)
    placement = spread([cut.call for cut in model.decoder.config.cuts], 3, [*Spread].index(Spread.DEALT))
    faults = {Rank(2): {3: Fault.DIE_BEFORE_ANSWER}}
    with divided(model, directory, "float32", placement, faults) as cluster:
        assert torch.equal(logits(model, 1, DECODE), expected)
        assert cluster.members[Rank(2)].fired and cluster.replayed


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe", "qwen3-moe-mixed", "llama3"])
def test_cut_or_whole_is_the_same_model(kind: str) -> None:
    """Up to rounding."""
    directory = str(model_directory(kind, "float32"))
    whole, cut = (
        logits(PagedSequences(directory, OPS, tensor_parallel=is_cut), 0, PREFILL) for is_cut in (False, True)
    )
    assert (whole - cut).abs().max() < 1e-4 * whole.abs().max()


def test_how_models_are_cut() -> None:
    """Constants: changing one changes the bits of every stream."""
    dense = ModelConfig.from_directory(model_directory("llama3"))
    assert [(c.kind, c.num_shards, c.shards_per_token, c.shard_size) for c in dense.cuts] == [("slice", 12, 12, 8)] * 2
    mixed = PagedSequences(str(model_directory("qwen3-moe-mixed")), OPS).decoder.config
    assert mixed.call_layers == (1,) and mixed.cuts[0].num_shards == 8
    divided_mixed = PagedSequences(str(model_directory("qwen3-moe-mixed")), OPS, tensor_parallel=True).decoder.config
    assert divided_mixed.call_layers == (0, 1, 2, 3)
    assert [(c.kind, c.num_shards, c.slices_per_expert) for c in divided_mixed.cuts[:2]] == [
        ("slice", 12, 1),
        ("expert", 16, 2),
    ]
