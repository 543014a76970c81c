"""greedy: the first of the highest logits, whatever chunk it is in."""

import math
from types import SimpleNamespace

import pytest
import torch

from everserve.backends.cuda.ops.greedy import CHUNK, greedy
from everserve.backends.cuda.ops.ops import CudaOps
from everserve.backends.cuda.sampling import rehearse_sampling


def run(stop, logits_LV: torch.Tensor) -> list[int]:
    tokens = greedy(logits_LV.to(stop.device), stop)
    assert tokens.dtype is torch.int32
    return tokens.tolist()


@pytest.mark.parametrize("size", [1, 100, CHUNK, CHUNK + 1, 3 * CHUNK + 77])
def test_greedy(stop, size):
    logits = torch.randn(5, size) - 10
    assert run(stop, logits) == logits.argmax(1).tolist()
    assert run(stop, logits[2:3]) == logits[2:3].argmax(1).tolist()


def test_the_lowest_token_of_equals(stop):
    logits = torch.zeros(3, 2 * CHUNK)
    logits[1, [5, 70, CHUNK + 3]] = 1.0
    logits[2, [CHUNK + 9, CHUNK + 3]] = 1.0
    assert run(stop, logits) == [0, 5, CHUNK + 3]


def test_infinities(stop):
    logits = torch.full((2, CHUNK + 50), -math.inf)
    logits[1, CHUNK + 20] = math.inf
    assert run(stop, logits) == [0, CHUNK + 20]


@pytest.mark.parametrize("at", [0, CHUNK + 5])
def test_not_a_number(stop, at):
    logits = torch.randn(3, CHUNK + 10)
    logits[1, at] = math.nan
    tokens = run(stop, logits)
    assert tokens[1] == -1 and tokens[::2] == logits[::2].argmax(1).tolist()


def test_no_rows(stop):
    assert run(stop, torch.zeros(0, 10)) == []


def test_nothing_is_written_once_stopped(stop, monkeypatch):
    monkeypatch.setattr(torch, "empty", torch.zeros)
    stop.fill_(1)
    logits = torch.zeros(2, 10)
    logits[:, 7] = 1
    assert run(stop, logits) == [0, 0]


@pytest.mark.parametrize("stop_word", [0, 1], ids=["a worker", "a spare"])
def test_every_way_of_choosing_can_be_rehearsed(device, stop_word):
    """A spare does so with everything stopped: what comes out of it means nothing, and is used for nothing."""
    ops = CudaOps(device, max_num_seqs=4, max_model_len=64)
    ops.words.stop.fill_(stop_word)
    rehearse_sampling(SimpleNamespace(ops=ops, model=SimpleNamespace(vocab_size=300), torch_device=device))
