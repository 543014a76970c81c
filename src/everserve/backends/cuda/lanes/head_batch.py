"""HeadBatch: a batch of heads, as `gather` leaves it for the kernels of ops/heads.py.

All rows of a home go to each of its heads here, in the order of tokens. The rows of one head of one home are a *job*:

    sorted rows    | slot 0, lane 0: token 0 1 2 .. | slot 0, lane 1: token 0 1 .. | slot 1, lane 0: ..
    jobs             0                                1                              2
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from everserve.backends.cuda.ops.experts import MANY_ROWS, SOME_ROWS, Tiles


@dataclass(frozen=True)
class HeadBatch:
    """Everything is int32, written by kernels, but for `is_head_L`. Without heads in the batch there are neither tiles
    nor jobs."""

    is_head_L: Tensor  # which calls are about heads
    tiles: Tiles  # of SOME_ROWS
    large_tiles: Tiles  # of MANY_ROWS; one of both is empty
    num_jobs: Tensor
    job_lane_J: Tensor
    job_slot_J: Tensor
    job_row_J: Tensor  # the first of its sorted rows
    job_size_J: Tensor  # how many there are
    lane_R: Tensor  # of each sorted row
    token_R: Tensor
    slot_R: Tensor

    @classmethod
    def empty(cls, is_head_L: Tensor, tiles: Tiles, max_jobs: int, max_rows: int) -> "HeadBatch":
        """`tiles`: lists that this batch shares with one of experts."""

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=is_head_L.device)

        return cls(
            is_head_L,
            tiles.alternative(SOME_ROWS),
            tiles.alternative(MANY_ROWS),
            zeros(1),
            *(zeros(max_jobs) for _ in range(4)),
            *(zeros(max_rows) for _ in range(3)),
        )

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """The arguments of `gather`."""
        return (
            self.num_jobs, self.job_lane_J, self.job_slot_J, self.job_row_J, self.job_size_J,
            self.lane_R, self.token_R, self.slot_R,
        )  # fmt: skip
