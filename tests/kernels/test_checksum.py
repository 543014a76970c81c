"""The checksum of a slot against its definition."""

import itertools

import pytest
import torch

from everserve.backends.cuda.ops.checksum import add_checksum
from everserve.memory.weights.checksum import checksum


def on_device(memory: torch.Tensor, *cuts: int) -> int:
    total = torch.zeros(1, dtype=torch.int64, device=memory.device)
    bounds = [0, *cuts, len(memory)]
    for first, end in itertools.pairwise(bounds):
        add_checksum(memory.data_ptr() + first, end - first, first // 8, total)
    return int(total.item()) % 2**64


@pytest.fixture
def memory(device) -> torch.Tensor:
    return torch.randint(0, 256, (100_016,), dtype=torch.uint8).to(device)


def test_all_words_count(device, memory):
    assert on_device(memory) == checksum(memory.cpu().numpy().tobytes())
    assert on_device(memory[:16]) == checksum(memory[:16].cpu().numpy().tobytes())


def test_pieces_add_up(memory):
    assert on_device(memory, 16, 32_768, 65_552) == on_device(memory)


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("at", [0, 50_007, 100_015])
def test_any_bit_counts(memory, at, bit):
    before = on_device(memory)
    memory[at] ^= 1 << bit
    assert on_device(memory) != before


def test_words_that_change_places_are_noticed(memory):
    before = on_device(memory)
    memory[:16] = torch.cat([memory[8:16], memory[:8]])
    assert on_device(memory) != before
