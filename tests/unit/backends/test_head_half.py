"""Heads computed apart have the bits of heads computed together: any subset, any order, prefill, chunks and decode."""

import random
from dataclasses import replace

import pytest
import torch

from everserve.backends.cpu import ops as native
from everserve.backends.cpu.reference import ReferenceOps
from everserve.memory.kv_pieces import KvPieces, PoolInUseError
from everserve.model.config import ModelConfig
from tests.support.batches import PagedSequences
from tests.support.heads import ManyHalves, PoolMemory, attend, head_half
from tests.support.models import model_directory, random_tokens

NATIVE = native.NativeOps(num_threads=1)
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# prefill; chunk after chunk; decode of one beside the prompt of another
STEPS = [{0: (0, 37)}, {0: (37, 38), 1: (0, 5)}, {1: (5, 21), 0: (38, 39)}, {0: (39, 40), 1: (21, 22)}]


def spread(config: ModelConfig, num_workers: int, seed: int) -> list[list[tuple[int, int]]]:
    """Every (layer, head) on one worker, at random."""
    rng = random.Random(seed)
    identities = [(layer, head) for layer in range(config.num_layers) for head in range(config.num_kv_heads)]
    rng.shuffle(identities)
    places: list[list[tuple[int, int]]] = [[] for _ in range(num_workers)]
    for identity in identities:
        places[rng.randrange(num_workers)].append(identity)
    return places


def run(sequences: PagedSequences, kv=None) -> list[torch.Tensor]:
    prompts = {seq: random_tokens(64, seed=seq) for seq in (0, 1)}
    sequences.kv_pool = sequences.kv_pool if kv is None else kv
    return [
        torch.cat([*sequences.step({seq: prompts[seq][a:b] for seq, (a, b) in step.items()}).values()])
        for step in STEPS
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3-moe", "llama-bias", "llama3"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_heads_apart_are_heads_together(kind, dtype, num_workers):
    directory = model_directory(kind, dtype)
    config = ModelConfig.from_directory(str(directory))
    together = run(PagedSequences(directory, NATIVE))
    halves = [
        head_half(directory, NATIVE, heads, PoolMemory(config, 64, len(heads), ITEM_BYTES[dtype]))
        for heads in spread(config, num_workers, seed=num_workers)
    ]
    sequences = PagedSequences(directory, NATIVE)
    device = sequences.kv_pool
    sequences.kv_pool = _Heads(ManyHalves(halves), device)
    for apart, expected in zip(run(sequences), together, strict=True):
        assert torch.equal(apart, expected)


class _Heads:
    """`PagedSequences` asks its pool where it is."""

    def __init__(self, heads, pool) -> None:
        self._heads, self.device = heads, pool.device

    def __call__(self, *args):
        return self._heads(*args)


def test_the_reference_says_the_same():
    directory = model_directory("llama-bias", "float32")
    config = ModelConfig.from_directory(str(directory))
    everything = [(layer, head) for layer in range(config.num_layers) for head in range(config.num_kv_heads)]
    reference = ReferenceOps(batch_invariant=True)
    sequences = PagedSequences(directory, reference)
    together = run(PagedSequences(directory, reference))
    half = head_half(directory, reference, everything, PoolMemory(config, 64, len(everything)))
    sequences.kv_pool = _Heads(ManyHalves([half]), sequences.kv_pool)
    for apart, expected in zip(run(sequences), together, strict=True):
        torch.testing.assert_close(apart, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_several_homes_in_one_call(num_threads):
    """Rows of several homes, with pages of their own, are what each would get alone."""
    native.set_num_threads(num_threads)
    directory = model_directory("qwen3-moe", "float32")
    config = ModelConfig.from_directory(str(directory))
    everything = [(0, head) for head in range(config.num_kv_heads)]
    homes = [PagedSequences(directory, NATIVE, num_blocks=64, seed=seed) for seed in (1, 2)]
    half, other = (head_half(directory, NATIVE, everything, PoolMemory(config, 64, 2)) for _ in range(2))
    homes[0]._free, homes[1]._free = list(range(32)), list(range(32, 64))
    for step in range(3):
        requests = []
        for i, home in enumerate(homes):
            length = (17, 1, 4)[(step + i) % 3]
            batch = home._batch({0: random_tokens(length, seed=step), 1: random_tokens(1 + i, seed=9)})
            x = torch.randn(batch.num_tokens, config.hidden_size, generator=torch.Generator().manual_seed(step + i))
            requests.append((x, batch))
        at_once = attend(half, 0, [1, 0], requests)
        one_by_one = [attend(other, 0, [0, 1], [request])[0].flip(1) for request in requests]
        assert all(torch.equal(a, b) for a, b in zip(at_once, one_by_one, strict=True))
    native.set_num_threads(1)


def test_an_empty_slot_is_an_error():
    directory = model_directory("qwen3-moe", "float32")
    config = ModelConfig.from_directory(str(directory))
    half = head_half(directory, NATIVE, [(0, 1)], PoolMemory(config, 4, 1))
    slot = list(half.held[0]).index(1)
    half.clear(0, slot)
    half.held[0][slot] = 1  # what no caller does
    batch = PagedSequences(directory, NATIVE)._batch({0: [1]})
    with pytest.raises(LookupError):
        attend(half, 0, [1], [(torch.zeros(1, config.hidden_size), batch)])


# the pool


def pool(num_pieces: int) -> PoolMemory:
    return PoolMemory(ModelConfig.from_directory(str(model_directory("llama3"))), 4, num_pieces)


def test_a_successor_finds_the_kv():
    """It is another pool until it was checked."""
    memory = pool(2)
    first = KvPieces(memory.fd, memory.shape)
    id, pieces = first.id, [first.piece_of(0, 1), first.piece_of(3, 0)]
    first.blocks[:4] = b"here"
    with pytest.raises(PoolInUseError):
        KvPieces(memory.fd, memory.shape)
    first.close()
    second = KvPieces(memory.fd, memory.shape)
    assert second.id not in (id, 0) and second.piece_of(3, 0) == pieces[1] and second.piece_of(0, 1) == pieces[0]
    assert bytes(second.blocks[:4]) == b"here"


def test_lost_kv_changes_the_id():
    memory = pool(2)
    first = KvPieces(memory.fd, memory.shape)
    first.piece_of(0, 0)
    id = first.id
    first.piece_of(0, 1)
    assert first.id == id, "a free piece costs nothing"
    with pytest.raises(ValueError, match="all in use"):
        first.piece_of(1, 1)
    first.give_up(0, 0)
    assert first.piece_of(0, 0) == 0 and first.id == id, "it was still there"
    first.give_up(0, 0)
    assert first.piece_of(1, 1) == 0 and first.id != id
    first.close()
    memory.forget()
    assert KvPieces(memory.fd, memory.shape).id not in (id, first.id)


def test_a_pool_of_another_shape_is_another_pool():
    memory = pool(2)
    first = KvPieces(memory.fd, memory.shape)
    id = first.id
    first.close()
    other = PoolMemory.__new__(PoolMemory)
    other.shape = replace(memory.shape, num_pieces=1)
    second = KvPieces(memory.fd, other.shape)
    assert second.id != id
