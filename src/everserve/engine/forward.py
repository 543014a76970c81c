"""What the engine computes a step with: rows in, logits out, KV written on the way."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from everserve.engine.batching import Rows, to_batch
from everserve.model.batch import StepBatch
from everserve.seam.experts import Experts, NoExperts


class Forward(Protocol):
    """logits_LV of `rows.logits_rows_L`. If it raises, the step never happened."""

    @property
    def num_captures(self) -> int:
        """Graphs captured so far."""

    def use_mask(self, masked: bytes) -> None:
        """The router leaves these experts out from now on: `Routes.masked`. Between two steps."""

    def __call__(self, rows: Rows, meanwhile: Callable[[], None]) -> Tensor:
        """`meanwhile` is called once, when the host has nothing else to do: at the latest before this returns."""


class EagerForward:
    """Computed here and now, by the processor that would have to do everything else too. `experts` may be replaced
    between two steps."""

    num_captures = 0

    def __init__(
        self,
        compute: Callable[[StepBatch, Experts], Tensor],
        device: torch.device,
        experts: Experts | None = None,
        use_mask: Callable[[bytes], None] = lambda masked: None,
    ) -> None:
        self.experts: Experts = experts or NoExperts()
        self._compute = compute
        self._device = device
        self.use_mask = use_mask

    def __call__(self, rows: Rows, meanwhile: Callable[[], None]) -> Tensor:
        meanwhile()
        self.experts.begin_step(len(rows.tokens_T))
        try:
            return self._compute(to_batch(rows, self._device), self.experts)
        finally:
            self.experts.end_step()
