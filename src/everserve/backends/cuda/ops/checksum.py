"""The checksum of memory on the device: the sum over its 64-bit words of word * (2 * index + 1), modulo 2**64.

Additions have no order, so any number of programs and of launches can share the work. The factors differ from word to
word, so words that change places change the sum; they are odd, so a change of any bit does.
"""

import triton
import triton.language as tl
from torch import Tensor

WORD_BYTES = 8
_WORDS = 4096  # per program
_PAIR_BYTES = 16


def add_checksum(address: int, num_bytes: int, first_word: int, total: Tensor) -> None:
    """Add the words of this memory to `total` (one int64), numbered from `first_word` on."""
    assert address % _PAIR_BYTES == num_bytes % _PAIR_BYTES == 0, "words are loaded in pairs"
    num_programs = triton.cdiv(num_bytes, _WORDS * WORD_BYTES)
    _checksum_kernel[(num_programs,)](address, num_bytes // _PAIR_BYTES, first_word, total, WORDS=_WORDS, num_warps=8)


@triton.jit(do_not_specialize=["num_pairs", "first_word"], do_not_specialize_on_alignment=["total"])
def _checksum_kernel(address, num_pairs, first_word, total, WORDS: tl.constexpr):
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    index = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    word = tl.load(words + index, mask=index < num_pairs * 2, other=0)
    product = word * (2 * (index + first_word) + 1)
    tl.atomic_add(total, tl.sum(product), sem="relaxed")
