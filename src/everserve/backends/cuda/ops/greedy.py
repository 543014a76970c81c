"""The token with the highest logit, in two stages: a row of the vocabulary is too long for one program.

logits_LV  |  chunk  |  chunk  | ...      a program each: its highest logit, and the first token that has it
                \\         /
                 one program per row: the highest of these
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.ops.pdl import early, is_stopped

CHUNK = 8192


def greedy(logits_LV: Tensor, stop: Tensor) -> Tensor:
    """int32 [L]: the token with the highest logit, the lowest of them if there are several; -1 if any logit is NaN."""
    assert logits_LV.dtype is torch.float32 and logits_LV.is_contiguous()
    num_rows, vocab_size = logits_LV.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    best_LC = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits_LV.device)
    token_LC = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits_LV.device)
    token_L = torch.empty(num_rows, dtype=torch.int32, device=logits_LV.device)
    if num_rows:
        _best_of_chunk[(num_rows, num_chunks)](
            logits_LV, best_LC, token_LC, stop,
            V=vocab_size, C=num_chunks, CHUNK=CHUNK, **early(logits_LV.device), num_warps=4,
        )  # fmt: skip
        _best_of_row[(num_rows,)](
            best_LC, token_LC, token_L, stop,
            C=num_chunks, C2=triton.next_power_of_2(num_chunks), **early(logits_LV.device), num_warps=1,
        )  # fmt: skip
    return token_L


@triton.jit
def _best_of_chunk(
    logits, best_out, token_out, stop, V: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """A chunk with a NaN in it has token -1."""
    if is_stopped(stop, EARLY):
        return
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row.to(tl.int64) * V + token, mask=token < V, other=float("-inf"))
    best = tl.max(logit, 0)
    first = tl.min(tl.where((logit == best) & (token < V), token, V), 0)
    is_nan = tl.max((logit != logit).to(tl.int32), 0)  # noqa: PLR0124
    tl.store(best_out + row * C + chunk, best)
    tl.store(token_out + row * C + chunk, tl.where(is_nan != 0, -1, first))


@triton.jit
def _best_of_row(best_in, token_in, token_out, stop, C: tl.constexpr, C2: tl.constexpr, EARLY: tl.constexpr):
    if is_stopped(stop, EARLY):
        return
    row = tl.program_id(0)
    chunk = tl.arange(0, C2)
    token = tl.load(token_in + row * C + chunk, mask=chunk < C, other=0)
    logit = tl.load(best_in + row * C + chunk, mask=chunk < C, other=float("-inf"))
    # Chunks ascend, so the lowest token among equals is in the first of them.
    first = tl.min(tl.where((logit == tl.max(logit, 0)) & (chunk < C), token, 2147483647), 0)
    tl.store(token_out + row, tl.where(tl.min(token, 0) < 0, -1, first))
