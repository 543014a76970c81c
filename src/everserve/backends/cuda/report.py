"""How a step on the device ends: it stores what became of it in host memory, where the host looks for it.

ended     counts reports; stored last

and, in turns in one of two places if two steps may be on their way:

stop      0, or 1 + the index of the MoE layer in which the step stopped
unplaced  an expert without a place, plus 1; or 0
absent    a bit for each rank without an answer
tokens    that the step has chosen, for each row with logits
"""

import ctypes
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.ops.pdl import await_before, early
from everserve.backends.cuda.ops.timeline import REPORT_NOTE, note
from everserve.backends.cuda.ops.words import Words

_FIRST_PLACE = 8  # behind `ended`
_STOP, _UNPLACED, _ABSENT, _FIRST_TOKEN = 0, 1, 2, 8


class StepReport:
    """Host memory that the device writes into. `chosen_L`: the tokens again, on the device, for the next step."""

    def __init__(self, max_tokens: int, device: torch.device, num_places: int = 2) -> None:
        self._place = _FIRST_TOKEN + max_tokens
        self._num_places = num_places
        self._words = torch.zeros(
            _FIRST_PLACE + num_places * self._place, dtype=torch.int64, pin_memory=device.type == "cuda"
        )  # fmt: skip
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self.chosen_L = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._view = self._words.numpy()
        self.address: int = self._words.data_ptr()
        self.num_due = 0  # how many reports there will be when all that was launched has ended
        assert ctypes.sizeof(ctypes.c_int64) == self._words.element_size()

    @property
    def ended(self) -> int:
        return int(self._view[0])

    def next(self) -> "ReportOf":
        """One more was launched."""
        self.num_due += 1
        return ReportOf(self, self.num_due)

    def word(self, number: int, at: int) -> int:
        """A word of the report with this number, until there are so many later ones as places."""
        return int(self._view[self._first(number) + at])

    def tokens(self, number: int, num: int) -> list[int]:
        first = self._first(number) + _FIRST_TOKEN
        tokens: list[int] = self._view[first : first + num].tolist()
        return tokens

    def launch(self, words: Words, tokens_L: Tensor) -> None:
        """Writes the report; to be captured as the last thing of a step."""
        _report[(1,)](
            self._words, self._count, words.stop, words.unplaced, words.absent, tokens_L, self.chosen_L,
            len(tokens_L),
            FIRST_PLACE=_FIRST_PLACE, PLACE=self._place, NUM_PLACES=self._num_places, FIRST_TOKEN=_FIRST_TOKEN,
            BLOCK=256, **early(tokens_L.device), num_warps=4,
        )  # fmt: skip

    def _first(self, number: int) -> int:
        return _FIRST_PLACE + number % self._num_places * self._place


@dataclass(frozen=True)
class ReportOf:
    """What is, or will be, the report with one number."""

    all: StepReport
    num_due: int

    @property
    def address(self) -> int:
        """The address of the word that counts reports."""
        return self.all.address

    @property
    def stop(self) -> int:
        return self.all.word(self.num_due, _STOP)

    @property
    def unplaced(self) -> int:
        return self.all.word(self.num_due, _UNPLACED)

    @property
    def absent(self) -> int:
        return self.all.word(self.num_due, _ABSENT)

    def tokens(self, num: int) -> list[int]:
        return self.all.tokens(self.num_due, num)


@triton.jit(do_not_specialize=["num_tokens"])
def _report(
    words, count, stop, unplaced, absent, tokens_L, chosen_L, num_tokens,
    FIRST_PLACE: tl.constexpr, PLACE: tl.constexpr, NUM_PLACES: tl.constexpr, FIRST_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_before(EARLY)
    note(stop, REPORT_NOTE)
    ended = tl.load(count) + 1
    stopped = tl.load(stop)
    place = words + FIRST_PLACE + ended % NUM_PLACES * PLACE
    tl.store(place, stopped.to(tl.int64))
    tl.store(place + 1, tl.load(unplaced).to(tl.int64))
    tl.store(place + 2, tl.load(absent))
    for first in range(0, num_tokens, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_token = at < num_tokens
        token = tl.load(tokens_L + at, mask=is_token, other=0)
        tl.store(place + FIRST_TOKEN + at, token.to(tl.int64), mask=is_token)
        if NUM_PLACES > 1:
            tl.store(chosen_L + at, token, mask=is_token & (stopped == 0))
    tl.store(count, ended)
    tl.debug_barrier()  # all of this before the word that says so
    tl.atomic_xchg(words, ended, sem="release", scope="sys")
