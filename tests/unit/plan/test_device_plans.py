"""Where weights lie in device memory, and how much of it is left for KV."""

import dataclasses
import itertools
import math
import re

import pytest

from everserve.errors import ConfigError
from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.model.layout import Layout
from everserve.model.spec import QkNorm
from everserve.plan.device import (
    ATTENTION_BUFFER_BYTES,
    CONTEXT_BYTES,
    DUMMY_BYTES,
    EXPERT_BUFFER_BYTES,
    DeviceMemory,
    WorkerNeeds,
    kv_bytes_per_worker,
)
from everserve.plan.weights import ALIGNMENT, PAGE_BYTES, WeightsPlan
from everserve.tables.ids import Rank, Role
from tests.support.specs import resized, some_dense, with_experts, with_mixers

ATTENTION, EXPERT = (Role.ATTENTION,), (Role.EXPERT,)
BOTH = (Role.ATTENTION, Role.EXPERT)
GIB = 1 << 30

DEMO = ModelConfig.from_directory(DEMO_MODEL)
MODELS = {
    "demo": DEMO,
    "untied": dataclasses.replace(DEMO, tie_word_embeddings=False),
    "biases": with_mixers(DEMO, qkv_bias=True, output_bias=True, qk_norm=QkNorm.NONE, has_sinks=True),
    "some dense layers": some_dense(DEMO, 1, 4),
    "all dense": some_dense(DEMO),
    "odd sizes": with_experts(resized(DEMO, vocab_size=4001, hidden_size=72), size=33),
}


# weights


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_plan_has_room_for_the_whole_model(model):
    """Both roles and all experts: as many numbers as a checkpoint of this model has."""
    sources = {source.name: source.shape for source in Layout(model, stacked_experts=False).all_sources()}
    plan = WeightsPlan.of(model, BOTH, model.max_shards)
    assert sum(math.prod(tensor.shape) for tensor in plan.tensors) == sum(map(math.prod, sources.values()))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("roles", "num_slots"), [(BOTH, 64), (ATTENTION, 0), (EXPERT, 24), (EXPERT, 1)])
def test_tensors_lie_apart_and_aligned(model, roles, num_slots):
    plan = WeightsPlan.of(model, roles, num_slots)
    assert plan.num_bytes % PAGE_BYTES == 0 and plan.num_bytes >= PAGE_BYTES
    assert all(tensor.offset % ALIGNMENT == 0 for tensor in plan.tensors)
    ends = [(tensor.offset, tensor.offset + tensor.num_bytes) for tensor in plan.tensors] + [(plan.num_bytes, 0)]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert len({(tensor.name, tensor.layer) for tensor in plan.tensors}) == len(plan.tensors)
    assert plan == WeightsPlan.of(model, roles, num_slots), "the same numbers in, the same places out"


def test_what_a_plan_knows():
    plan = WeightsPlan.of(MODELS["some dense layers"], BOTH, num_slots=3)
    hidden, size = DEMO.hidden_size, DEMO.cuts[0].shard_size
    assert plan.tensor("experts").shape == (2 * 3, 3, size, hidden)
    assert plan.has("router", 1) and not plan.has("router", 0)
    assert plan.has("gate_up", 0) and not plan.has("gate_up", 1)
    assert plan.offset("embedding") == 0 < plan.offset("qkv", 0) < plan.offset("qkv", 1) < plan.offset("experts")
    assert not plan.has("lm_head"), "tied: it is the embedding"
    experts = WeightsPlan.of(DEMO, EXPERT, num_slots=3)
    assert [tensor.name for tensor in experts.tensors] == ["experts"]
    with pytest.raises(KeyError):
        experts.offset("embedding")


@pytest.mark.parametrize("num_slots", [1, 3, 64])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_boxes_of_rows_end_within_the_memory(model, num_slots):
    """Kernels read 128 rows of gate, up or down at a time, from a multiple of that on."""
    if not model.moe_layers:
        return
    plan = WeightsPlan.of(model, EXPERT, num_slots)
    hidden, size = model.hidden_size, model.cuts[0].shard_size
    last = (plan.tensor("experts").shape[0] - 1) * 3 * size * hidden * 2
    up_ends = last + (size + -(-size // 128) * 128) * hidden * 2
    down_ends = last + 2 * size * hidden * 2 + -(-hidden // 128) * 128 * size * 2
    assert max(up_ends, down_ends) <= plan.num_bytes


# what is left


def worker(rank: int, roles=ATTENTION, device=0, weights=GIB, lanes=0) -> WorkerNeeds:
    return WorkerNeeds(Rank(rank), device, roles, weights, lanes)


def test_kv_gets_what_the_others_leave():
    device = DeviceMemory(total_bytes=100 * GIB, free_bytes=100 * GIB)
    workers = [worker(0, lanes=2 * GIB), worker(1, lanes=2 * GIB), worker(2, EXPERT, weights=30 * GIB)]
    reserved = 4 * CONTEXT_BYTES + 2 * ATTENTION_BUFFER_BYTES + EXPERT_BUFFER_BYTES + 3 * DUMMY_BYTES
    assert kv_bytes_per_worker([device], workers, 0.9) == (90 * GIB - 36 * GIB - reserved) // 2


def test_spares_cost_memory_too():
    devices = [DeviceMemory(100 * GIB, 100 * GIB)] * 2
    workers = [worker(0), worker(1, device=1)]
    spare = CONTEXT_BYTES + ATTENTION_BUFFER_BYTES
    assert kv_bytes_per_worker(devices, workers, 0.9, num_spares=2) == (
        kv_bytes_per_worker(devices, workers, 0.9) - 2 * spare
    )


def test_the_fullest_device_decides_for_all():
    devices = [DeviceMemory(80 * GIB, 80 * GIB)] * 3
    workers = [worker(0), worker(1, device=1), worker(2, device=1), worker(3, EXPERT, device=2, weights=60 * GIB)]
    alone = kv_bytes_per_worker(devices[:1], workers[:1], 0.9)
    shared = kv_bytes_per_worker(devices, workers, 0.9)
    assert 0 < shared < alone / 2


def test_others_on_the_device_count_when_they_leave_less():
    mostly_free = DeviceMemory(100 * GIB, 95 * GIB)
    assert kv_bytes_per_worker([mostly_free], [worker(0)], 0.9) == kv_bytes_per_worker(
        [DeviceMemory(100 * GIB, 100 * GIB)], [worker(0)], 0.9
    )
    half_taken = DeviceMemory(100 * GIB, 50 * GIB)
    assert kv_bytes_per_worker([half_taken], [worker(0)], 0.9) < 50 * GIB


@pytest.mark.parametrize(
    ("needs", "free_gib", "words"),
    [
        (worker(0, weights=20 * GIB), 24, "20.0 GiB for weights.*smaller model"),
        (worker(0, lanes=20 * GIB), 24, "20.0 GiB for lanes.*--max-num-batched-tokens"),
        (worker(0, weights=15 * GIB), 10, "others use 14.0 GiB.*end what else uses the device"),
    ],
)
def test_what_does_not_fit_is_said_part_by_part(needs, free_gib, words):
    with pytest.raises(ConfigError) as raised:
        kv_bytes_per_worker([DeviceMemory(24 * GIB, free_gib * GIB)], [needs], 0.9)
    assert re.search(words, str(raised.value)), raised.value
