"""The C kernels against plain formulas in float64, and bit for bit against themselves under every way of batching."""

import functools
import itertools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from everserve.backends.cpu import ops as native
from everserve.backends.cpu.reference import ReferenceOps
from everserve.model.batch import StepBatch
from everserve.model.ops import NO_EXPERT, RowIndices, RowMemory, Scores, ShardWeights
from everserve.model.rope import Rotation
from everserve.model.spec import Norm
from tests.support.experts import routed

if native.unavailable():
    pytest.skip(f"no native ops: {native.unavailable()}", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ops() -> native.NativeOps:
    return native.NativeOps(num_threads=1)


def both_thread_counts(compute):
    """The result, after checking that two threads give the same bits as one."""
    native.set_num_threads(1)
    one = compute()
    native.set_num_threads(2)
    two = compute()
    native.set_num_threads(1)
    for a, b in zip(one if isinstance(one, tuple) else [one], two if isinstance(two, tuple) else [two], strict=True):
        assert torch.equal(a, b)
    return one


def unaligned(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random numbers one element past an aligned address, as a tensor in a mapped file may lie."""
    count = math.prod(shape)
    return (torch.randn(count + 1) * scale).to(dtype)[1:].view(shape)


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Within `tolerance` of the largest expected value: float32 sums of different order differ by so much."""
    error = (actual.double() - expected).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), error


# linear


@dtypes
@pytest.mark.parametrize("k", [1, 3, 16, 37, 64, 512, 700])
@pytest.mark.parametrize("n", [1, 5, 8, 37, 130])
def test_linear(ops, dtype, k, n):
    weight, bias = unaligned(n, k, dtype=dtype), unaligned(n, dtype=dtype)
    for m in (1, 2, 3, 4, 5, 9, 13, 64):
        x, residual = unaligned(m, k, dtype=torch.float32), unaligned(m, n, dtype=torch.float32)
        product = x.double() @ weight.double().T
        close(ops.linear(x, weight), product, 1e-5)
        close(ops.linear(x, weight, bias), product + bias.double(), 1e-5)
        close(ops.linear(x, weight, bias, residual), product + bias.double() + residual.double(), 1e-5)


@dtypes
@pytest.mark.parametrize(("k", "n"), [(37, 131), (512, 384), (5000, 40)])
def test_linear_is_batch_and_thread_invariant(ops, dtype, k, n):
    x, weight, residual = torch.randn(300, k), unaligned(n, k, dtype=dtype), torch.randn(300, n)
    whole = both_thread_counts(lambda: ops.linear(x, weight, None, residual))
    close(whole, x.double() @ weight.double().T + residual.double(), 1e-5)
    for first, count in [(0, 1), (299, 1), (7, 1), (3, 2), (11, 3), (20, 4), (31, 5), (100, 12), (150, 64)]:
        rows = slice(first, first + count)
        part = both_thread_counts(lambda rows=rows: ops.linear(x[rows], weight, None, residual[rows]))
        assert torch.equal(part, whole[rows])
    assert torch.equal(ops.linear(x, weight[5:9]), ops.linear(x, weight)[:, 5:9].contiguous())


def test_linear_reads_column_shards_in_place(ops):
    x, weight = torch.randn(6, 64), torch.randn(48, 160)
    shard = weight[:, 32:96]
    assert torch.equal(ops.linear(x, shard), ops.linear(x, shard.contiguous()))


def test_linear_of_no_rows(ops):
    assert ops.linear(torch.empty(0, 16), torch.randn(8, 16)).shape == (0, 8)


def test_linear_refuses_what_it_would_misread(ops):
    x, weight = torch.randn(4, 16), torch.randn(8, 16)
    for bad_x, bad_weight in [
        (x.double(), weight),
        (x.T, weight),
        (x[:, :8], weight),
        (x, weight.T),
        (x, weight[:, :8]),
    ]:
        with pytest.raises(AssertionError):
            ops.linear(bad_x, bad_weight)
    with pytest.raises(AssertionError, match="float64"):
        ops.linear(x, weight.double())


# rows


@dtypes
def test_embed(ops, dtype):
    table, tokens = unaligned(50, 37, dtype=dtype), torch.tensor([49, 0, 7, 7, 20], dtype=torch.int32)
    assert torch.equal(ops.embed(tokens, table), table[tokens.long()].float())
    assert torch.equal(ops.embed(tokens, table[:, 5:30]), table[tokens.long(), 5:30].float())
    assert ops.embed(tokens[:0], table).shape == (0, 37)
    for wrong in (50, -1):
        with pytest.raises(IndexError, match=f"row 1: token {wrong} of 50"):
            ops.embed(torch.tensor([3, wrong], dtype=torch.int32), table)


def test_rms_norm_of_some_rows(ops):
    x, weight = torch.randn(9, 64), torch.randn(64)
    whole = ops.norm(x, weight, Norm(eps=1e-5))
    for rows in ([0, 4, 8], [*range(9)], []):
        assert torch.equal(ops.norm(x, weight, Norm(eps=1e-5), torch.tensor(rows, dtype=torch.int64)), whole[rows])


@dtypes
@pytest.mark.parametrize("size", [1, 7, 64, 100, 512])
def test_rms_norm(ops, dtype, size):
    x, weight, eps = torch.randn(300, size) * 3, unaligned(size, dtype=dtype), 1e-5
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    whole = both_thread_counts(lambda: ops.norm(x, weight, Norm(eps=eps)))
    close(whole, expected)
    assert all(torch.equal(ops.norm(x[i : i + 1], weight, Norm(eps=eps))[0], whole[i]) for i in (0, 17, 299))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_combine(ops, top_k):
    rows, weights, residual = torch.randn(300, top_k, 100), torch.rand(300, top_k), torch.randn(300, 100)
    expected = residual
    for k in range(top_k):
        expected = expected + weights[:, k, None] * rows[:, k]
    # Not only close: the order and rounding of the sum are promised.
    assert torch.equal(both_thread_counts(lambda: ops.combine(rows, weights, residual)), expected)


# route


@dtypes
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (6, 2), (16, 4), (60, 8), (128, 8)])
@pytest.mark.parametrize("renormalise", [False, True])
def test_route(ops, dtype, num_experts, top_k, renormalise):
    x, router = torch.randn(70, 100), unaligned(num_experts, 100, dtype=dtype, scale=0.3)
    ids, weights = both_thread_counts(lambda: ops.route(x, *routed(router, top_k, renormalise)))
    expected, expected_ids = (x.double() @ router.double().T).softmax(-1).topk(top_k)
    if renormalise:
        expected = expected / expected.sum(-1, keepdim=True)
    assert ids.dtype is torch.int32 and torch.equal(ids.long(), expected_ids)
    close(weights, expected)
    for i in (0, 9, 69):
        alone = ops.route(x[i : i + 1], *routed(router, top_k, renormalise))
        assert torch.equal(alone[0][0], ids[i]) and torch.equal(alone[1][0], weights[i])


def test_route_ties_go_to_the_lower_expert(ops):
    router = torch.zeros(12, 8)
    router[5] = router[9] = 1.0
    ids, _ = ops.route(torch.ones(1, 8), *routed(router, 5, True))
    assert ids[0].tolist() == [5, 9, 0, 1, 2]


def test_route_of_nan_names_real_experts(ops):
    ids, weights = ops.route(torch.full((1, 8), math.nan), *routed(torch.randn(6, 8), 3, True))
    assert len({*ids[0].tolist()} & {*range(6)}) == 3 and weights.isnan().all()


@pytest.mark.parametrize("ops_", [native.NativeOps(2), ReferenceOps(batch_invariant=True)], ids=lambda ops: ops.name)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("masked", [[], [0], [1, 4, 5], [*range(1, 14)], [*range(14)]])
def test_a_mask_is_a_router_that_gives_no_chance(ops_, renormalise, masked):
    """The same bits; but where fewer than K are left, no expert is named, and none is asked."""
    num_experts, top_k = 14, 4
    x, router = torch.randn(30, 33), torch.randn(num_experts, 33)
    x[:, -1], router[:, -1] = 1.0, 0.0
    allowed = torch.ones(num_experts, dtype=torch.int32)
    allowed[masked] = 0
    ids, weights = ops_.route(x, *routed(router, top_k, renormalise), allowed)
    router[masked] = 0.0
    router[masked, -1] = -1e30
    expected_ids, expected = ops_.route(x, *routed(router, top_k, renormalise))
    num_left = min(top_k, num_experts - len(masked))
    assert torch.equal(ids[:, :num_left], expected_ids[:, :num_left])
    assert (ids[:, num_left:] == NO_EXPERT).all() and (weights[:, num_left:] == 0).all()
    if num_left:
        assert torch.equal(weights, expected)


def test_rows_without_an_expert_are_zeros(ops):
    slots, _ = experts(3, 16, 16, torch.float32)
    x, token = torch.randn(2, 16), torch.tensor([0, 1, 1], dtype=torch.int32)
    y = ops.expert_rows(x, token, torch.tensor([2, NO_EXPERT, 0], dtype=torch.int32), slots)
    both = ops.expert_rows(x, token[[0, 2]], torch.tensor([2, 0], dtype=torch.int32), slots)
    assert torch.equal(y[[0, 2]], both) and not y[1].any()
    nothing = ops.expert_rows(x, token, torch.full((3,), NO_EXPERT, dtype=torch.int32), slots)
    assert not nothing.any()


# experts


def experts(num_slots: int, hidden: int, inner: int, dtype: torch.dtype) -> tuple[native.NativeExpertSlots, list]:
    slots = native.NativeExpertSlots(num_slots)
    weights = []
    for slot in range(num_slots):
        gate, up = (unaligned(inner, hidden, dtype=dtype, scale=hidden**-0.5) for _ in range(2))
        down = unaligned(hidden, inner, dtype=dtype, scale=inner**-0.5)
        slots.fill(slot, ShardWeights(gate, up, down))
        weights.append((gate, up, down))
    return slots, weights


def expert_formula(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    x, gate, up, down = x.double(), gate.double(), up.double(), down.double()
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@dtypes
@pytest.mark.parametrize(("hidden", "inner"), [(64, 96), (37, 51), (128, 200)])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 64, 300])
def test_expert_rows(ops, dtype, hidden, inner, num_rows):
    slots, weights = experts(5, hidden, inner, dtype)
    x = torch.randn(40, hidden) * 2
    token = torch.randint(40, (num_rows,), dtype=torch.int32)
    slot = torch.randint(1, 5, (num_rows,), dtype=torch.int32)  # slot 0 has no rows
    y = both_thread_counts(lambda: ops.expert_rows(x, token, slot, slots))
    assert y.shape == (num_rows, hidden)
    for r in range(0, num_rows, 7):
        close(y[r], expert_formula(x[token[r]], *weights[slot[r]]), 1e-5)
        assert torch.equal(ops.expert_rows(x, token[r : r + 1], slot[r : r + 1], slots)[0], y[r])
    if num_rows:
        some = torch.randperm(num_rows)[: num_rows // 2 + 1]
        assert torch.equal(ops.expert_rows(x, token[some], slot[some], slots), y[some])


def test_experts_of_several_dtypes_share_a_layer(ops):
    slots, weights = experts(3, 32, 48, torch.float32)
    for slot, dtype in enumerate(DTYPES):
        weights[slot] = tuple(w.to(dtype) for w in weights[slot])
        slots.fill(slot, ShardWeights(*weights[slot]))
    x, index = torch.randn(3, 32), torch.arange(3, dtype=torch.int32)
    y = ops.expert_rows(x, index, index, slots)
    for slot in range(3):
        close(y[slot], expert_formula(x[slot], *weights[slot]), 1e-5)


def test_silu_keeps_its_accuracy_and_its_limits(ops):
    """With gate, up and down picking single numbers, expert_rows is silu itself."""
    slots = native.NativeExpertSlots(1)
    slots.fill(0, ShardWeights(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0], [0.0]])))
    x = torch.cat([torch.linspace(-110, 110, 40001), torch.tensor([0.0, 1e30, -1e30, math.inf])])
    x = torch.stack([x, torch.ones_like(x)], 1)
    x[-1, 0] = 500.0
    index = torch.arange(len(x), dtype=torch.int32)
    y = ops.expert_rows(x, index, torch.zeros_like(index), slots)[:, 0].double()
    expected = torch.nn.functional.silu(x[:, 0].double())
    assert ((y - expected).abs() <= 2.5 * 2.0**-24 * expected.abs() + 1e-36).all()


def test_empty_and_unknown_slots_are_refused(ops):
    slots, _ = experts(3, 16, 16, torch.float32)
    slots.clear(1)
    x, token = torch.randn(2, 16), torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(LookupError, match="row 1: expert slot 1 is empty"):
        ops.expert_rows(x, token, torch.tensor([0, 1], dtype=torch.int32), slots)
    for slot in (3, -2):
        with pytest.raises(IndexError, match=f"row 0: expert slot {slot} of 3"):
            ops.expert_rows(x, token, torch.tensor([slot, 0], dtype=torch.int32), slots)
    with pytest.raises(IndexError, match="row 0: token 2 of 2"):
        ops.expert_rows(x, token + 2, torch.zeros(2, dtype=torch.int32), slots)
    with pytest.raises(AssertionError, match="one size"):
        slots.fill(1, ShardWeights(torch.randn(8, 16), torch.randn(8, 16), torch.randn(16, 8)))


# in place


def scattered(num_rows: int, size: int, *parts: int) -> tuple[Tensor, RowMemory, list[Tensor]]:
    """Memory of `num_rows` rows full of NaN, and different rows of it, in random order."""
    memory = torch.full((num_rows, size), math.nan)
    rows = torch.randperm(num_rows).int().split([*parts, num_rows - sum(parts)])
    return memory, RowMemory(memory.data_ptr(), num_rows, size), [part.contiguous() for part in rows]


@pytest.mark.parametrize("ops_", [native.NativeOps(1), ReferenceOps(batch_invariant=True)], ids=lambda ops: ops.name)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 70])
def test_expert_rows_in_place(ops_, num_rows):
    hidden, num_tokens, slots = 40, 12, ops_.expert_slots(3)
    for slot in range(3):
        slots.fill(slot, ShardWeights(torch.randn(24, hidden), torch.randn(24, hidden), torch.randn(hidden, 24)))
    memory, where, (x_at, y_at, others) = scattered(200, hidden, num_tokens, num_rows)
    x = torch.randn(num_tokens, hidden)
    memory[x_at.long()] = x
    token = torch.randint(num_tokens, (num_rows,), dtype=torch.int32)
    slot = torch.randint(3, (num_rows,), dtype=torch.int32)
    token_at = x_at[token.long()]
    ops_.expert_rows_at(where, RowIndices(token_at.data_ptr(), slot.data_ptr(), y_at.data_ptr(), num_rows), slots)
    assert torch.equal(memory[y_at.long()], ops_.expert_rows(x, token, slot, slots))
    assert torch.equal(memory[x_at.long()], x) and memory[others.long()].isnan().all(), "nothing else is touched"


def test_expert_rows_in_place_stay_in_place(ops):
    slots, _ = experts(2, 16, 16, torch.float32)
    memory, where, _ = scattered(8, 16)
    index = torch.arange(3, dtype=torch.int32)
    for token, slot, y in [(8, 0, 1), (-1, 0, 1), (0, 0, 8), (0, 0, -1), (0, 2, 1), (0, -1, 1)]:
        arrays = [index.clone() for _ in range(3)]
        arrays[1][:] = 0
        for array, value in zip(arrays, (token, slot, y), strict=True):
            array[1] = value
        with pytest.raises(IndexError, match="row 1"):
            ops.expert_rows_at(where, RowIndices(*(array.data_ptr() for array in arrays), 3), slots)
    assert memory.isnan().all()


@pytest.mark.parametrize("ops_", [native.NativeOps(1), ReferenceOps()], ids=lambda ops: ops.name)
@pytest.mark.parametrize("num_tokens", [0, 1, 50])
def test_combine_in_place(ops_, num_tokens):
    top_k, size = 3, 20
    memory, _, (at, _) = scattered(200, size, num_tokens * top_k)
    rows = torch.randn(num_tokens, top_k, size)
    memory[at.long()] = rows.view(-1, size)
    addresses = memory.data_ptr() + at.long() * memory.stride(0) * 4
    weights, residual = torch.rand(num_tokens, top_k), torch.randn(num_tokens, size)
    combined = ops_.combine_at(addresses.data_ptr(), weights, residual)
    assert torch.equal(combined, ops_.combine(rows, weights, residual))


# attention


class Sequences:
    """A pool with the blocks of some sequences scattered in it, filled with NaN where nothing was stored."""

    def __init__(
        self, lengths: list[int], heads: int, kv_heads: int, size: int, dtype: torch.dtype, block_size: int = 16
    ) -> None:
        self.lengths, self.heads, self.size, self.block_size = lengths, heads, size, block_size
        widths = [-(-length // block_size) for length in lengths]
        shuffled = torch.randperm(sum(widths) + 3, dtype=torch.int32)
        self.tables = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
        for s, (blocks, width) in enumerate(zip(shuffled.split([*widths, 3]), widths, strict=False)):
            self.tables[s, :width] = blocks
        self.pool = torch.full((len(shuffled), 2, 2, kv_heads, block_size, size), math.nan).to(dtype)
        angle = torch.arange(max(lengths))[:, None] * 0.7 ** torch.arange(size // 2)
        self.cos, self.sin = (torch.cat([f(angle)] * 2, 1).float() for f in (torch.cos, torch.sin))
        width = (heads + 2 * kv_heads) * size
        self.qkv = [torch.randn(length, width) for length in lengths]
        self.norms = (torch.rand(size) + 0.5, torch.rand(size) + 0.5)

    def batch(self, pieces: list[tuple[int, int, int]]) -> tuple[StepBatch, Tensor]:
        """Rows first..end of sequences, and their qkv."""
        sequence = torch.tensor([s for s, _, _ in pieces])
        positions = torch.cat([torch.arange(first, end) for _, first, end in pieces])
        starts = torch.tensor([0] + [end - first for _, first, end in pieces]).cumsum(0)
        of_row = sequence.repeat_interleave(starts.diff())
        slots = self.tables[of_row, positions // self.block_size] * self.block_size + positions % self.block_size
        batch = StepBatch(
            tokens_T=torch.zeros(len(positions), dtype=torch.int32),
            positions_T=positions.int(),
            kv_slots_T=slots.int(),
            query_starts_S=starts.int(),
            block_tables_SB=self.tables[sequence].contiguous(),
            logits_rows_L=torch.zeros(0, dtype=torch.int64),
        )
        return batch, torch.cat([self.qkv[s][first:end] for s, first, end in pieces])

    def rotation(self, norms: bool = False) -> Rotation:
        return Rotation(self.cos, self.sin, *(self.norms if norms else (None, None)), 1e-6)

    def run(self, ops, pieces: list[tuple[int, int, int]], norms: bool = False) -> Tensor:
        batch, qkv = self.batch(pieces)
        q = ops.rotate_and_store(qkv, batch, self.pool, 1, self.rotation(norms))
        return ops.attend(q, batch, self.pool, 1, Scores(self.size**-0.5))

    def expected(self, sequence: int, norms: bool = False) -> Tensor:
        length, kv_heads = self.lengths[sequence], self.pool.shape[3]
        heads = self.qkv[sequence].double().view(length, -1, self.size)
        q, k, v = heads.split([self.heads, kv_heads, kv_heads], 1)
        if norms:
            q, k = (
                t * (t.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()
                for t, w in zip((q, k), self.norms, strict=True)
            )
        cos, sin = self.cos[:length, None].double(), self.sin[:length, None].double()
        half = self.size // 2
        q, k = (t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin for t in (q, k))
        k, v = (t.to(self.pool.dtype).double().repeat_interleave(self.heads // kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhe,khe->hqk", q, k) * self.size**-0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        return torch.einsum("hqk,khe->qhe", scores.softmax(-1), v).reshape(length, -1)


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (8, 2), (8, 1), (6, 2)])
@pytest.mark.parametrize("size", [16, 48, 64, 128])
def test_attention(ops, dtype, heads, kv_heads, size):
    lengths = [70, 1, 33]
    sequences = Sequences(lengths, heads, kv_heads, size, dtype)
    out = both_thread_counts(lambda: sequences.run(ops, [(s, 0, n) for s, n in enumerate(lengths)], norms=size == 64))
    # A half precision pool may round a key that lies on the edge between two numbers the other way.
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for s, rows in enumerate(out.split(lengths)):
        close(rows, sequences.expected(s, norms=size == 64), tolerance)


@dtypes
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize(
    "cuts", [[1, 40, 41], [16, 99], [*range(1, 100)]], ids=["chunks", "chunks at tiles", "row by row"]
)
def test_prefill_chunks_and_decode_give_the_same_bits(ops, dtype, block_size, cuts):
    whole, other = Sequences([100, 37], 8, 2, 32, dtype), Sequences([100, 37], 8, 2, 32, dtype, block_size)
    other.qkv = whole.qkv
    expected = whole.run(ops, [(0, 0, 100), (1, 0, 37)])
    rows = []
    for first, end in itertools.pairwise([0, *cuts, 100]):
        beside = [(1, first, min(end, 37))] if first < 37 else []  # sequence 1, while it has rows
        pieces = [(0, first, end), *beside]
        rows.append(both_thread_counts(functools.partial(other.run, ops, pieces))[: end - first])
    assert torch.equal(torch.cat(rows), expected[:100])


def test_stored_keys_and_values_are_rounded_as_torch_does(ops):
    for dtype in DTYPES:
        sequences = Sequences([40], 4, 2, 16, dtype)
        batch, qkv = sequences.batch([(0, 0, 40)])
        qkv[:4] *= torch.tensor([1e-6, 1e-8, 1e5, math.inf])[:, None]  # subnormal, zero, overflow, infinity in float16
        ops.rotate_and_store(qkv, batch, sequences.pool, 0, sequences.rotation())
        values = sequences.pool[:, 0, 1].transpose(1, 2).reshape(-1, 2, 16)[batch.kv_slots_T.long()]
        assert torch.equal(values, qkv[:, -32:].view(40, 2, 16).to(dtype))
        assert sequences.pool[:, 1].isnan().all(), "another layer was touched"


def test_inconsistent_batches_are_refused(ops):
    sequences = Sequences([40, 20], 4, 2, 16, torch.float32)
    wrong_block = sequences.tables.clone()
    wrong_block[0, 0] = 1000
    for field, value, message in [
        ("query_starts_S", torch.tensor([0, 40, 59]).int(), "query_starts"),
        ("positions_T", torch.arange(60).int().roll(1), "positions"),
        ("block_tables_SB", wrong_block, "KV slot"),
        ("kv_slots_T", torch.zeros(60).int(), "KV slot"),
    ]:
        batch, qkv = sequences.batch([(0, 0, 40), (1, 0, 20)])
        fields = {**vars(batch), field: value}
        with pytest.raises(AssertionError, match=message):
            ops.rotate_and_store(qkv, StepBatch(**fields), sequences.pool, 0, sequences.rotation())


# processes and threads


def in_new_process(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", "import os, torch\nfrom everserve.backends.cpu import ops as native\n" + code]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, **environment}
    ).stdout.strip()


def test_no_thread_starts_before_it_is_needed_and_a_fork_gets_its_own():
    """One process: load, run small and single-threaded ops, then a shared op, then fork and share again."""
    output = in_new_process("""
torch.set_num_threads(1)
def threads(): return len(os.listdir("/proc/self/task"))
before = threads()
ops = native.NativeOps(num_threads=2, spin_us=0)
x, w = torch.randn(64, 256), torch.randn(512, 256)
small = ops.linear(x[:1], w[:32])
native.set_num_threads(1)
one = ops.linear(x, w)
assert threads() == before, threads()
native.set_num_threads(2)
assert torch.equal(ops.linear(x, w), one)
assert threads() == before + 1
child = os.fork()
if child == 0:
    assert threads() == 1
    for _ in range(200): assert torch.equal(ops.linear(x, w), one)
    assert threads() == 2
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("done")
""")
    assert output == "done"


def test_more_threads_than_cores_and_two_callers(ops):
    x, weight = torch.randn(16, 256), torch.randn(512, 256)
    expected = ops.linear(x, weight)
    for spin_us in (0.0, 5.0):
        native.set_num_threads(7, spin_us)
        with ThreadPoolExecutor(3) as callers:
            results = [callers.submit(ops.linear, x, weight) for _ in range(300)]
            assert all(torch.equal(r.result(), expected) for r in results)
    native.set_num_threads(1)
