"""How a step on the device ends: it stores what became of it in host memory, where the host looks for it.

ended     counts reports; stored last
stop      0, or 1 + the index of the MoE layer in which the step stopped
unplaced  an expert without a place, plus 1; or 0
absent    a bit for each rank without an answer
tokens    the most likely token of each row with logits
"""

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.ops.pdl import await_before, early
from everserve.backends.cuda.ops.words import Words

_ENDED, _STOP, _UNPLACED, _ABSENT, _FIRST_TOKEN = 0, 1, 2, 3, 8


class StepReport:
    """Host memory that the device writes into."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self._words = torch.zeros(_FIRST_TOKEN + max_tokens, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._view = self._words.numpy()
        self.address: int = self._words.data_ptr() + 8 * _ENDED
        self.num_due = 0  # how many reports there will be when all that was launched has ended
        assert ctypes.sizeof(ctypes.c_int64) == self._words.element_size()

    @property
    def ended(self) -> int:
        return int(self._view[_ENDED])

    @property
    def stop(self) -> int:
        return int(self._view[_STOP])

    @property
    def unplaced(self) -> int:
        return int(self._view[_UNPLACED])

    @property
    def absent(self) -> int:
        return int(self._view[_ABSENT])

    def tokens(self, num: int) -> list[int]:
        tokens: list[int] = self._view[_FIRST_TOKEN : _FIRST_TOKEN + num].tolist()
        return tokens

    def launch(self, words: Words, tokens_L: Tensor) -> None:
        """To be captured as the last thing of a step."""
        _report[(1,)](
            self._words, self._count, words.stop, words.unplaced, words.absent, tokens_L, len(tokens_L),
            FIRST=_FIRST_TOKEN, BLOCK=256, **early(tokens_L.device), num_warps=4,
        )  # fmt: skip


@triton.jit
def _report(
    words, count, stop, unplaced, absent, tokens_L, num_tokens,
    FIRST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_before(EARLY)
    ended = tl.load(count) + 1
    tl.store(words + 1, tl.load(stop).to(tl.int64))
    tl.store(words + 2, tl.load(unplaced).to(tl.int64))
    tl.store(words + 3, tl.load(absent))
    for first in range(0, num_tokens, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_token = at < num_tokens
        tl.store(words + FIRST + at, tl.load(tokens_L + at, mask=is_token, other=0).to(tl.int64), mask=is_token)
    tl.store(count, ended)
    tl.debug_barrier()  # all of this before the word that says so
    tl.atomic_xchg(words, ended, sem="release", scope="sys")
