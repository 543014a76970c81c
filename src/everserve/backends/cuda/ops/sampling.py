"""Drawing tokens: `choose` (model/choosing.py) as one kernel, a program per row, without sorting.

Weights are e^((logit - highest) / temperature), so the best token weighs 1. They are numbers >= 0, whose bits order as
they do. What a sort would tell, a bisection over these bits finds too: the weight above which there is just so much
mass, or just so many tokens. Every step of it reads the row once more, which is still in the cache.

best first, equal weights by id:  |  all weights above `edge`  |  the first `ties` of those at `edge`  |  not kept

All sums are float64, and a row is added up in the same order whatever else is in the batch.

`sample` runs between steps, and does not look at `stop`. `draw_into` is the end of a step: the most likely tokens are
there already, and rows with a temperature get another one, some rows at a time, since weights take room.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.ops.pdl import early, is_stopped
from everserve.model.choosing import Draw

BLOCK = 8192
_MOST_PROGRAMS = 128  # of `draw_into`
_NUM_WARPS = 32
_BEST = tl.constexpr(0x3F800000)  # the bits of 1, the highest weight


def sample(logits_LV: Tensor, draws: Sequence[Draw], block: int = BLOCK) -> list[int]:
    """One token per row; -1 where a logit is not a number. The device is asked once."""
    num_rows, vocab_size = logits_LV.shape
    assert num_rows == len(draws) and logits_LV.dtype is torch.float32 and logits_LV.is_contiguous()
    if num_rows == 0:
        return []
    padded_size = triton.cdiv(vocab_size, block) * block
    draws_L5 = torch.tensor(draws, dtype=torch.float64, device=logits_LV.device)
    weights_LP = torch.empty(num_rows, padded_size, dtype=torch.float32, device=logits_LV.device)
    token_L = torch.empty(num_rows, dtype=torch.int32, device=logits_LV.device)
    _sample[(num_rows,)](logits_LV, draws_L5, weights_LP, token_L, vocab_size, BLOCK=block, num_warps=_NUM_WARPS)
    tokens: list[int] = token_L.tolist()
    return tokens


def make_weights(num_rows: int, logits_LV: Tensor, block: int = BLOCK) -> Tensor:
    """The room that `draw_into` needs for so many rows of such logits."""
    padded_size = triton.cdiv(logits_LV.shape[1], block) * block
    return torch.empty(min(num_rows, _MOST_PROGRAMS), padded_size, dtype=torch.float32, device=logits_LV.device)


def draw_into(
    token_L: Tensor, logits_LV: Tensor, draws_L5: Tensor, weights_PV: Tensor, stop: Tensor, block: int = BLOCK
) -> None:
    """Replace the tokens of rows that have a temperature. `draws_L5`: as `Draw`, float64."""
    num_rows, vocab_size = logits_LV.shape
    assert len(token_L) == num_rows <= len(draws_L5) and draws_L5.dtype is torch.float64
    assert logits_LV.dtype is torch.float32 and logits_LV.is_contiguous() and logits_LV.numel() < 1 << 31
    if num_rows:
        _draw_into[(min(num_rows, len(weights_PV)),)](
            logits_LV, draws_L5, weights_PV, token_L, stop, num_rows, vocab_size,
            BLOCK=block, **early(logits_LV.device), num_warps=_NUM_WARPS,
        )  # fmt: skip


@triton.jit
def _sample(logits, draws, weights, token_out, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    padded_size = tl.cdiv(vocab_size, BLOCK) * BLOCK
    weights += row * padded_size
    token = _choose_one(logits + row * vocab_size, draws + row * 5, weights, vocab_size, padded_size, BLOCK)
    tl.store(token_out + row, token)


@triton.jit(do_not_specialize=["num_rows"])
def _draw_into(logits, draws, weights, token_out, stop, num_rows, vocab_size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """A program has a row's weights at a time."""
    if is_stopped(stop, EARLY):
        return
    padded_size = tl.cdiv(vocab_size, BLOCK) * BLOCK
    weights += tl.program_id(0).to(tl.int64) * padded_size
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        draw = draws + row * 5
        if tl.load(draw) > 0:
            tl.debug_barrier()  # all threads are done with the weights of the row before
            token = _choose_one(logits + row * vocab_size, draw, weights, vocab_size, padded_size, BLOCK)
            tl.store(token_out + row, token)


@triton.jit
def _choose_one(logits, draw, weights, vocab_size, padded_size, BLOCK: tl.constexpr):
    """The token of one row."""
    temperature = tl.load(draw)
    highest, is_nan = _highest(logits, vocab_size, BLOCK)
    token = -1
    if is_nan == 0:
        if temperature > 0:
            last = _weigh(logits, vocab_size, highest, temperature.to(tl.float32), weights, padded_size, BLOCK)
            # From here on threads may read what others of this program wrote.
            tl.debug_barrier()
            token = _draw(weights, padded_size, last, draw, BLOCK)
        else:
            token = _first_equal(logits, vocab_size, highest, BLOCK)
    return token


@triton.jit
def _highest(logits, vocab_size, BLOCK: tl.constexpr):
    """The highest logit, and whether any is not a number."""
    id = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    is_nan = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        logit = tl.load(logits + start + id, mask=start + id < vocab_size, other=float("-inf"))
        highest = tl.maximum(highest, logit)
        is_nan |= (logit != logit).to(tl.int32)  # noqa: PLR0124
    return tl.max(highest, 0), tl.max(is_nan, 0)


@triton.jit
def _first_equal(logits, vocab_size, value, BLOCK: tl.constexpr):
    id = tl.arange(0, BLOCK)
    first = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + id
        logit = tl.load(logits + token, mask=token < vocab_size, other=float("nan"))
        first = tl.minimum(first, tl.where(logit == value, token, 2147483647))
    return tl.min(first, 0)


@triton.jit
def _weigh(logits, vocab_size, highest, temperature, weights, padded_size, BLOCK: tl.constexpr):
    """Writes the weights of a row, 0 after its end; returns the last token that has any."""
    id = tl.arange(0, BLOCK)
    last = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, padded_size, BLOCK):
        token = start + id
        logit = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
        # The highest weighs 1 even if it is infinite, or the temperature so low that it is 0 as float32. And no other
        # weighs more, however a device rounds.
        weight = tl.minimum(tl.exp((logit - highest) / temperature), 1.0)
        weight = tl.where(logit == highest, 1.0, weight)
        weight = tl.where(token < vocab_size, weight, 0.0)
        tl.store(weights + token, weight)
        last = tl.where(weight > 0, token, last)
    return tl.max(last, 0)


@triton.jit
def _draw(weights, size, last, draw, BLOCK: tl.constexpr):
    """Inverse transform: over all ids in order where nothing is filtered, else over what is kept, best first."""
    top_k, top_p, min_p, uniform = tl.load(draw + 1), tl.load(draw + 2), tl.load(draw + 3), tl.load(draw + 4)
    if (top_k > 0) | (top_p < 1) | (min_p > 0):
        edge, mass = _kept(weights, size, top_k, top_p, min_p, BLOCK)
        token = _at_mass(weights, size, edge, uniform * mass, BLOCK)
    else:
        mass, _, _ = _split(weights, size, 0, False, BLOCK)
        token = _at_mass_by_id(weights, size, last, uniform * mass, BLOCK)
    return token


@triton.jit
def _kept(weights, size, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """The lowest weight of which the filters leave anything, and the mass of all that they leave.

    Tokens that weigh nothing are left out from the start: they come last, and are never drawn.
    """
    edge = tl.maximum(min_p.to(tl.float32).to(tl.int32, bitcast=True) - 1, 0)
    ties = tl.full((), 0.0, tl.float64)
    if top_k > 0:
        found, above = _edge(weights, size, edge, top_k, True, BLOCK)
        ties = tl.where(found > edge, top_k - above, 0.0)  # not above it: there are no more than top_k
        edge = found
    above, lowest_above, _ = _split(weights, size, edge, False, BLOCK)
    mass = above + ties * _weight(edge)
    edge = tl.where(ties > 0, edge, lowest_above)
    if top_p < 1:
        enough = top_p * mass
        edge, above = _edge(weights, size, edge, enough, False, BLOCK)
        ties = tl.ceil((enough - above) / _weight(edge))
        mass = above + ties * _weight(edge)
    return edge, mass


@triton.jit
def _at_mass(weights, size, edge, target, BLOCK: tl.constexpr):
    """The token, best first, at which the mass of what is kept exceeds the target; the best one if nothing is kept."""
    found, above = _edge(weights, size, edge, target, False, BLOCK)
    num_before = tl.floor((target - above) / _weight(found))
    return _equal_after(weights, size, found, num_before.to(tl.int32), BLOCK)


@triton.jit
def _at_mass_by_id(weights, size, last, target, BLOCK: tl.constexpr):
    """The token, in the order of ids, at which the mass exceeds the target."""
    id = tl.arange(0, BLOCK)
    token = last  # if rounding runs past the end
    before = tl.full((), 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        weight = tl.load(weights + start + id).to(tl.float64)
        after = before + tl.sum(weight, 0)
        if (before <= target) & (target < after):
            # Sums of a scan are rounded each in its own way: one may exceed the target where nothing was added.
            is_beyond = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
            last_here = tl.max(tl.where(weight > 0, start + id, 0), 0)
            token = tl.min(tl.where(is_beyond, start + id, last_here), 0)
        before = after
    return token


@triton.jit
def _edge(weights, size, low, bound, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest weight, from `low` on, above which there is no more than `bound`; and what there is.

    If it is not `low` itself, then there are tokens of that very weight: one less, and they would be above it. So both
    ends may move on to the next weight that there is: few steps are needed where weights are far apart.
    """
    high = tl.full((), _BEST, tl.int32)
    above = tl.full((), 0.0, tl.float64)
    while low < high:
        amount, lowest_above, highest_below = _split(weights, size, (low + high) // 2, COUNT, BLOCK)
        fits = amount <= bound
        above = tl.where(fits, amount, above)
        high = tl.where(fits, tl.maximum(low, highest_below), high)
        low = tl.where(fits, low, lowest_above)
    return high, above


@triton.jit
def _split(weights, size, edge, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Splits the weights: of those above this one their mass, or their number, and the lowest; of the others the
    highest.
    """
    id = tl.arange(0, BLOCK)
    amount = tl.zeros((BLOCK,), tl.int32 if COUNT else tl.float64)
    lowest_above = tl.full((BLOCK,), _BEST, tl.int32)
    highest_below = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, size, BLOCK):
        weight = tl.load(weights + start + id)
        bits = weight.to(tl.int32, bitcast=True)
        is_above = bits > edge
        amount += is_above.to(tl.int32) if COUNT else tl.where(is_above, weight, 0.0).to(tl.float64)
        lowest_above = tl.minimum(lowest_above, tl.where(is_above, bits, _BEST))
        highest_below = tl.maximum(highest_below, tl.where(is_above, 0, bits))
    return tl.sum(amount, 0).to(tl.float64), tl.min(lowest_above, 0), tl.max(highest_below, 0)


@triton.jit
def _equal_after(weights, size, edge, num_before, BLOCK: tl.constexpr):
    """The token of exactly this weight that has so many before it, or the last one if there are fewer."""
    id = tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), tl.int32)
    num_seen = 0
    for start in range(0, size, BLOCK):
        is_equal = (tl.load(weights + start + id).to(tl.int32, bitcast=True) == edge).to(tl.int32)
        is_within = num_seen + tl.cumsum(is_equal, 0) <= num_before + 1
        found = tl.where((is_equal != 0) & is_within, start + id, found)
        num_seen += tl.sum(is_equal, 0)
    return tl.max(found, 0)


@triton.jit
def _weight(bits):
    return bits.to(tl.float32, bitcast=True).to(tl.float64)
