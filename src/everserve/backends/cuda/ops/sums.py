"""Sums: a product as `Linear` leaves it.

Of few rows it is left in splits (dense.py), and the kernel that reads it adds them: a separate kernel would take longer
to launch than to run. Of many rows it is complete.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Sums(NamedTuple):
    """`data` is [T, O] and complete, or [S, T, O] in float32; then bias and residual are still to be added too."""

    data: Tensor
    num_splits: int = 0  # 0: complete
    bias_O: Tensor | None = None
    residual_TO: Tensor | None = None  # float32

    @property
    def num_rows(self) -> int:
        return self.data.shape[-2]

    @property
    def num_columns(self) -> int:
        return self.data.shape[-1]


@triton.jit
def summed(data, bias, residual, at, column, size, mask, NUM_SPLITS: tl.constexpr):
    """The elements `at` of `Sums`, float32. `size`: of a split. The order is that of `Linear` in registers."""
    total = tl.load(data + at, mask=mask, other=0.0).to(tl.float32)
    if NUM_SPLITS > 0:
        total += 0.0  # what comes first is added to nothing, and then there is no -0
        for split in tl.static_range(1, NUM_SPLITS):
            total += tl.load(data + size * split + at, mask=mask, other=0.0)
        if bias is not None:
            total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        if residual is not None:
            total += tl.load(residual + at, mask=mask, other=0.0)
    return total
