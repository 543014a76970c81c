"""How a lane in device memory is laid out. (What a lane is: everserve.backends.cpu.lane.)

    flag | answer | status | request | position | pool | counts 0, 1 | x 0 | y 0 | x 1 | y 1 | page

    flag      int32   what the attention worker's stream waits for: -1 when something was sent, 0 when it was answered.
                      Writing 0 ends the wait; only `answer` says whether there is an answer.
    answer    int64   the sequence number that was answered last
    status    int64   of that answer: 0 computed, otherwise why not (seam/outcomes.py: Status)
    request   int64   seq << 16 | begins << 15 | call_index << 1 | replay. Written last. Box seq & 1 has the rows.
                      begins: this is the first of a step, and the one to let it begin: there may be no rows
    position  int32   1 + the index, among layers with experts, that its sender is on the way to; 0: do not wait
    pool      int64   where heads are divided: the identity of the expert worker's KV (head_memory.py). Written by its
                      host before the first answer
    counts    int32   for each slot: how many of the box's rows it is to compute, and which expert it should
                      hold, count | (expert + 1) << COUNT_BITS; rows are sorted by slot. A slot that holds another one
                      does not compute: its word gets the sign bit, and the answer says MOVED
    x, y      bf16    max_rows rows each
    page      int32   where heads are divided: the rows of the step at hand (page.py)

A new lane is all zeros, and that is how it begins: neither end has to do anything before the other may use it.
Words that are waited for are 128 bytes apart. x and y begin at whole numbers of rows from the beginning of the lane,
and lanes of one process lie lane_bytes() apart, by rank: so any row is an index from the first lane's beginning.

This module needs neither torch nor triton: the process that allocates lanes does not load them.
"""

import math
from dataclasses import dataclass

NUM_BOXES = 2
_LINE = 128
FLAG_AT, ANSWER_AT, STATUS_AT, REQUEST_AT, POSITION_AT, POOL_AT, _COUNTS_AT = range(0, 7 * _LINE, _LINE)
_GRANULE = 2 << 20  # of device memory
_BF16_BYTES = 2
_INT32_BYTES = 4
_MAX_INT32 = 2**31 - 1
# A count is at most max_tokens. 16 bits would be too few for them: how many tokens are in a step is a setting without
# a limit. 11 bits are left for the expert.
COUNT_BITS = 20
MAX_EXPERTS = (1 << 31 - COUNT_BITS) - 1


def moved_expert(word: int) -> int | None:
    """The expert that a slot was asked for and does not hold; None if the slot's word is not marked so."""
    return (word + (1 << 31) >> COUNT_BITS) - 1 if word < 0 else None


@dataclass(frozen=True)
class CudaLaneShape:
    """What a lane must have room for: all tokens of a step, as many of their experts as one worker can hold, and a
    page."""

    max_tokens: int
    top_k: int
    hidden_size: int
    num_slots: int
    page_words: int = 0  # 0: heads are not divided

    def __post_init__(self) -> None:
        assert min(self.max_tokens, self.top_k, self.num_slots) > 0, self
        assert self.max_tokens < 1 << COUNT_BITS, "more tokens than a count can count"
        assert self.hidden_size > 0 and self.hidden_size % 8 == 0, "rows begin at multiples of 16 bytes"

    @property
    def max_rows(self) -> int:
        return self.max_tokens * min(self.top_k, self.num_slots)  # a slot gets each token at most once

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * _BF16_BYTES

    @property
    def counts_bytes(self) -> int:
        """Bytes from the counts of one box to those of the next."""
        return _up(self.num_slots * _INT32_BYTES, _LINE)

    def counts_at(self, box: int) -> int:
        return _COUNTS_AT + box * self.counts_bytes

    @property
    def box_rows(self) -> int:
        """Rows from the rows of one box to those of the next."""
        return 2 * self.max_rows

    def first_x(self, box: int) -> int:
        """The first row of x, counted from the beginning of the lane."""
        return -(-self.counts_at(NUM_BOXES) // self.row_bytes) + box * self.box_rows

    def first_y(self, box: int) -> int:
        return self.first_x(box) + self.max_rows

    @property
    def page_at(self) -> int:
        return _up(self.first_x(NUM_BOXES) * self.row_bytes, _LINE)

    def lane_bytes(self) -> int:
        """How much memory a lane needs, and how far lanes are apart: a whole number of granules and of rows."""
        return _up(self.page_at + self.page_words * _INT32_BYTES, math.lcm(_GRANULE, self.row_bytes))

    def lane_rows(self) -> int:
        return self.lane_bytes() // self.row_bytes

    def check(self, num_lanes: int) -> None:
        """Can so many lanes be in one process?"""
        if num_lanes * self.lane_rows() > _MAX_INT32:
            raise ValueError(f"{num_lanes} lanes of {self} have more rows than an index can count")


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
