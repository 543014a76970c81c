"""Which slices a row goes to, and a token's row of the embedding: as torch would compute them, unless stopped."""

import pytest
import torch

from everserve.backends.cuda.ops import slices
from everserve.backends.cuda.ops.rows import embed
from everserve.model import shard_choice


@pytest.mark.parametrize("num_slices", [1, 3, 8])
def test_all_slices(device, stop, num_slices):
    positions_T = torch.tensor([0, 7, -1, 3], dtype=torch.int32, device=device)
    for ours, theirs in zip(
        slices.all_slices(positions_T, num_slices, stop), shard_choice.all_slices(positions_T, num_slices), strict=True
    ):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("num_slices", [2, 3, 8])
def test_slices_of_experts(device, stop, num_slices):
    ids_TK = torch.tensor([[3, 0], [5, -1], [-1, -1]], dtype=torch.int32, device=device)
    weights_TK = torch.tensor([[0.5, 0.25], [1.0, 0.0], [0.0, 0.0]], device=device)
    for ours, theirs in zip(
        slices.sliced(ids_TK, weights_TK, num_slices, stop),
        shard_choice.sliced(ids_TK, weights_TK, num_slices),
        strict=True,
    ):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [8, 100, 1500])
def test_embed(device, stop, size, monkeypatch):
    embedding_VD = torch.randn(11, size).bfloat16().to(device)
    tokens_T = torch.tensor([3, 10, 0, 3], dtype=torch.int32, device=device)
    assert torch.equal(embed(tokens_T, embedding_VD, stop), embedding_VD.index_select(0, tokens_T).float())
    assert embed(tokens_T[:0], embedding_VD, stop).shape == (0, size)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    assert not embed(tokens_T, embedding_VD, stop + 1).any()
