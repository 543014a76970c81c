"""Whoever adds the splits of a product itself comes to the same bits as if it had been complete."""

import pytest
import torch
from torch import Tensor

from everserve.backends.cuda.ops import dense
from everserve.backends.cuda.ops.dense import Linear
from everserve.backends.cuda.ops.routing import route
from everserve.backends.cuda.ops.rows import add_and_norm, norm, rotate_and_store
from everserve.backends.cuda.ops.sums import Sums
from everserve.model.rope import Rotation
from everserve.model.spec import Norm, Router

EPS = 1e-5
NORM = Norm(eps=EPS)


def random(device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype).to(device)


@pytest.fixture
def both(monkeypatch, stop):
    """The same product in splits, and complete."""

    def make(linear: Linear, x: Tensor, **options) -> tuple[Sums, Sums]:
        split = linear.sums(x, stop, **options)
        monkeypatch.setattr(dense, "ENOUGH_TILES", 1)
        complete = linear.sums(x, stop, **options)
        assert split.num_splits > 1 and complete.num_splits == 0
        assert split.num_rows == complete.num_rows == len(x) and split.num_columns == complete.num_columns
        return split, complete

    return make


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("size", "num_rows"), [(24, 3), (1536, 3), (4096, 1)])
def test_norm(device, stop, both, size, num_rows, has_bias):
    linear = Linear(random(device, size, 1536), random(device, size) if has_bias else None)
    linear.split_size = 512
    x, residual = random(device, num_rows, 1536), random(device, num_rows, size, dtype=torch.float32)
    weight = random(device, size)
    split, complete = both(linear, x, residual_TO=residual)
    whole, normed = add_and_norm(split, weight, NORM, stop)
    expected, expected_normed = add_and_norm(complete, weight, NORM, stop)
    assert torch.equal(whole, expected) and torch.equal(normed, expected_normed)
    assert torch.equal(normed, norm(whole, weight, NORM, stop))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotation(device, stop, both, has_bias, has_norms):
    heads, kv_heads, size, num_rows = 4, 2, 64, 5
    width = (heads + 2 * kv_heads) * size
    linear = Linear(random(device, width, 1024), random(device, width) if has_bias else None)
    linear.split_size = 512
    norms = [random(device, size) if has_norms else None for _ in range(2)]
    cos, sin = random(device, 2, 40, size, dtype=torch.float32)
    positions = torch.tensor([3, 39, 0, 7, -1], dtype=torch.int32, device=device)
    slots = torch.tensor([5, 31, 2, 16, -1], dtype=torch.int32, device=device)
    results = []
    for sums in both(linear, random(device, num_rows, 1024)):
        pool = torch.zeros(2, 1, 2, kv_heads, 16, size, dtype=torch.bfloat16, device=device)
        q = rotate_and_store(sums, positions, slots, pool, 0, Rotation(cos, sin, *norms, EPS), heads, stop)
        results.append((q, pool))
    (q, pool), (expected_q, expected_pool) = results
    assert q.any() and torch.equal(q, expected_q)
    assert pool.any() and torch.equal(pool, expected_pool)


def test_gating(device, stop, both):
    linear = Linear(random(device, 12, 2048))
    positions = torch.tensor([0, 5, -1], dtype=torch.int32, device=device)
    allowed = torch.tensor([1] * 11 + [0], dtype=torch.int32, device=device)
    split, complete = both(linear, random(device, 3, 2048), out_dtype=torch.float32)
    ids, weights = route(split, positions, allowed, Router(top_k=4, renormalise=True), stop)
    expected_ids, expected_weights = route(complete, positions, allowed, Router(top_k=4, renormalise=True), stop)
    assert torch.equal(ids, expected_ids) and torch.equal(weights, expected_weights)
    assert (ids[2] == -1).all() and (ids[:2] >= 0).all() and (ids != 11).all()


def test_nothing_is_written_once_stopped(device, stop, monkeypatch):
    linear = Linear(random(device, 16, 1024))
    x, residual = random(device, 3, 1024), random(device, 3, 16, dtype=torch.float32)
    sums = linear.sums(x, stop, residual_TO=residual)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    stop.fill_(1)
    whole, normed = add_and_norm(sums, random(device, 16), NORM, stop)
    assert not whole.any() and not normed.any()
