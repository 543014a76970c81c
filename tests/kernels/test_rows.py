"""Norm, rotation and the store of keys and values, against the reference; a row is the same in company."""

import math

import pytest
import torch
from torch import Tensor

from everserve.backends.cpu.reference import ReferenceOps
from everserve.backends.cuda.ops.rows import norm, rotate_and_store
from everserve.backends.cuda.ops.sums import Sums
from everserve.model.batch import StepBatch
from everserve.model.rope import Rotation
from everserve.model.spec import Norm

reference = ReferenceOps()
EPS = 1e-5
NORM = Norm(eps=EPS)


def close(actual: Tensor, expected: Tensor, tolerance: float = 2**-8) -> None:
    """As near as rounding to bfloat16 comes."""
    assert actual.shape == expected.shape
    assert ((actual.float() - expected).abs() <= tolerance * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("size", [8, 100, 1536])
def test_rms_norm(device, stop, dtype, size):
    x, weight = (torch.randn(9, size) * 3).to(dtype).to(device), torch.randn(size).bfloat16().to(device)
    whole = norm(x, weight, NORM, stop)
    assert whole.dtype is torch.bfloat16
    close(whole, reference.norm(x.float(), weight, NORM))
    assert all(torch.equal(norm(x[i : i + 1].contiguous(), weight, NORM, stop)[0], whole[i]) for i in (0, 5, 8))
    assert norm(x[:0], weight, NORM, stop).shape == (0, size)


class Rows:
    """Rows at scattered places of a pool full of NaN; the last two are padding."""

    num_layers, layer, num_blocks, num_rows = 3, 2, 6, 11

    def __init__(self, device, heads: int, kv_heads: int, size: int, block_size: int, norms: bool, dtype) -> None:
        self.heads = heads
        self.pool = torch.full((self.num_blocks, self.num_layers, 2, kv_heads, block_size, size), math.nan)
        self.pool = self.pool.bfloat16().to(device)
        self.qkv = torch.randn(self.num_rows, (heads + 2 * kv_heads) * size).to(dtype).to(device)
        angle = torch.arange(40)[:, None] * 0.7 ** torch.arange(size // 2)
        tables = (torch.cat([f(angle)] * 2, 1).float().to(device) for f in (torch.cos, torch.sin))
        weights = [(torch.rand(size) + 0.5).bfloat16().to(device) if norms else None for _ in range(2)]
        self.rotation = Rotation(*tables, *weights, EPS)
        self.positions, self.slots = (torch.full((self.num_rows,), -1, dtype=torch.int32) for _ in range(2))
        self.positions[:-2] = torch.randint(40, (self.num_rows - 2,))
        self.slots[:-2] = torch.randperm(self.num_blocks * block_size)[: self.num_rows - 2]
        self.positions, self.slots = self.positions.to(device), self.slots.to(device)

    def run(self, stop, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        pool = self.pool.clone()
        q = rotate_and_store(
            Sums(self.qkv[rows].contiguous()), self.positions[rows], self.slots[rows], pool, self.layer,
            self.rotation, self.heads, stop,
        )  # fmt: skip
        return q, pool

    def expected(self) -> tuple[Tensor, Tensor]:
        rows = slice(0, self.num_rows - 2)
        pool, nothing = self.pool.float(), torch.zeros(0)
        batch = StepBatch(
            tokens_T=nothing,
            positions_T=self.positions[rows],
            kv_slots_T=self.slots[rows],
            query_starts_S=nothing,
            block_tables_SB=nothing,
            logits_rows_L=nothing,
        )
        qkv = self.qkv[rows].float()
        q = reference.rotate_and_store(qkv, batch, pool, self.layer, self.rotation)
        return q, pool


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size"), [(16, 8, 32, 16), (6, 2, 128, 32), (7, 1, 16, 16)]
)
def test_rotate_and_store(device, stop, heads, kv_heads, size, block_size, dtype, norms):
    rows = Rows(device, heads, kv_heads, size, block_size, norms, dtype)
    (q, pool), (expected_q, expected_pool) = rows.run(stop), rows.expected()
    # Rotation subtracts, so errors are of the size of what is subtracted.
    close(q[:-2], expected_q, 2**-7)
    assert (q[-2:] == 0).all()
    untouched = expected_pool.isnan()
    assert torch.equal(pool.isnan(), untouched)
    close(pool[~untouched], expected_pool[~untouched], 2**-7)
    assert torch.equal(pool[:, rows.layer, 1].nan_to_num(7), expected_pool[:, rows.layer, 1].bfloat16().nan_to_num(7))


def test_a_row_is_rotated_and_stored_the_same_alone(device, stop):
    rows = Rows(device, 8, 2, 64, 16, True, torch.bfloat16)
    whole_q, whole_pool = rows.run(stop)
    for row in (0, 4, 8):
        q, pool = rows.run(stop, slice(row, row + 1))
        stored = ~pool.isnan()
        assert torch.equal(q[0], whole_q[row]) and stored.any() and torch.equal(pool[stored], whole_pool[stored])


def test_nothing_is_written_once_stopped(device, stop, monkeypatch):
    stop.fill_(1)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    rows = Rows(device, 8, 2, 64, 16, False, torch.bfloat16)
    q, pool = rows.run(stop)
    assert not q.any() and pool.isnan().all()
    ones = torch.ones(2, 8, device=device)
    assert not norm(ones, ones[0].bfloat16(), NORM, stop).any()
