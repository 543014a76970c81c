"""How a step on the device begins: it takes its rows from where they arrived (staging.py), and from the step before it
the tokens that only this one knows. Not if it is stopped: then a step in front of it is not over."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.ops.timeline import STEP_NOTE, note
from everserve.backends.cuda.staging import Staging

_BLOCK = 2048


def take_in(staging: Staging, chosen_L: Tensor, stop: Tensor) -> None:
    """To be captured as the first thing of a step. `chosen_L`, int32: what the step before has chosen."""
    size, tokens = len(staging.words), staging.spans["tokens"]
    assert chosen_L.dtype is torch.int32
    _take_in[(triton.cdiv(size, _BLOCK),)](
        staging.arrived_words, staging.words, chosen_L, stop,
        SIZE=size, TOKENS=tokens.start, NUM_ROWS=tokens.stop - tokens.start, SOURCES=staging.spans["sources"].start,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _take_in(
    arrived, words, chosen, stop,
    SIZE: tl.constexpr, TOKENS: tl.constexpr, NUM_ROWS: tl.constexpr, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    note(stop, STEP_NOTE)
    if tl.load(stop) != 0:
        return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(arrived + at, mask=at < SIZE, other=0)
    is_token = (at >= TOKENS) & (at < TOKENS + NUM_ROWS)
    source = tl.load(arrived + SOURCES + at - TOKENS, mask=is_token, other=-1)
    token = tl.load(chosen + source, mask=source >= 0, other=0)
    # A row whose logits were not numbers has no token. Its stream ends; until then any token will do.
    word = tl.where(source >= 0, tl.maximum(token, 0), word)
    tl.store(words + at, word, mask=at < SIZE)
