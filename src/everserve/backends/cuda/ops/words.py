"""Words in device memory through which a step's kernels tell each other, and the host, that it cannot go on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from everserve.backends.cuda.ops.timeline import make_stop


@dataclass(frozen=True)
class Words:
    """`stop`: 0, or 1 + the index of the MoE layer in which the step stopped. Every kernel looks at it first, and does
    nothing if it is set. The other two say why (backends/cuda/lanes)."""

    stop: Tensor  # int32
    unplaced: Tensor  # int32: 1 + an expert that has no place; 0: all have
    absent: Tensor  # int64: a bit for each rank that has not answered

    @classmethod
    def on(cls, device: torch.device) -> "Words":
        return cls(
            stop=make_stop(device),
            unplaced=torch.zeros(1, dtype=torch.int32, device=device),
            absent=torch.zeros(1, dtype=torch.int64, device=device),
        )
