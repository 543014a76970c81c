"""The words of many lanes at once, as kernels see them: addresses are computed, not looked up.

Words that two processes share are read and written by atomics at system scope. A word that says "it is there" is
released by its writer and acquired by its reader, and so is everything that was written before it.
"""

import triton
import triton.language as tl

from everserve.backends.cuda.lanes import lane

FLAG = tl.constexpr(lane.FLAG_AT)
ANSWER = tl.constexpr(lane.ANSWER_AT)
STATUS = tl.constexpr(lane.STATUS_AT)
REQUEST = tl.constexpr(lane.REQUEST_AT)
POSITION = tl.constexpr(lane.POSITION_AT)


@triton.jit
def words32(region, ranks, LANE_BYTES: tl.constexpr, AT: tl.constexpr):
    """Pointers to an int32 word in the lanes of some ranks. `region` is the address of the first lane."""
    return (region + ranks.to(tl.int64) * LANE_BYTES + AT).to(tl.pointer_type(tl.int32))


@triton.jit
def words64(region, ranks, LANE_BYTES: tl.constexpr, AT: tl.constexpr):
    return (region + ranks.to(tl.int64) * LANE_BYTES + AT).to(tl.pointer_type(tl.int64))
