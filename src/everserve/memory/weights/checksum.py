"""The checksum of an expert's weights.

    sum over i of word[i] * (2 i + 1)  mod 2^64

where word[i] are the 64-bit little-endian words of the bytes of gate, then up, then down (the last word filled with
zeros). Every factor is odd, so a change of any one word changes the sum, and so do words in other places. Partial sums
over any parts of the words, in any order, add up to the sum: a kernel can compute it in one pass.

`checksum` is the definition; csrc/copy.c computes the same at memory speed.
"""

import numpy as np

WORD_BYTES = 8


def checksum(data: bytes | memoryview, first_word: int = 0) -> int:
    """The checksum of these bytes, which begin at this word of the expert."""
    raw = bytes(data)
    words = np.frombuffer(raw + bytes(-len(raw) % WORD_BYTES), dtype="<u8")
    factors = 2 * np.arange(first_word, first_word + len(words), dtype=np.uint64) + np.uint64(1)
    return int((words * factors).sum(dtype=np.uint64))
