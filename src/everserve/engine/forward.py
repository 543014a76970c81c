"""What the engine computes a step with: rows in, logits out, KV written on the way."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from everserve.engine.batching import Rows, to_batch
from everserve.model.batch import StepBatch


class Forward(Protocol):
    """logits_LV of `rows.logits_rows_L`. If it raises, the step never happened."""

    @property
    def num_captures(self) -> int:
        """Graphs captured so far."""

    def __call__(self, rows: Rows, meanwhile: Callable[[], None]) -> Tensor:
        """`meanwhile` is called once, when the host has nothing else to do: at the latest before this returns."""


class Stepping(Protocol):
    """Told when a step begins and ends (backends/cpu/remote_experts.py)."""

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...


class EagerForward:
    """Computed here and now, by the processor that would have to do everything else too."""

    num_captures = 0

    def __init__(
        self, compute: Callable[[StepBatch], Tensor], device: torch.device, stepping: Stepping | None = None
    ) -> None:
        self.stepping = stepping
        self._compute = compute
        self._device = device

    def __call__(self, rows: Rows, meanwhile: Callable[[], None]) -> Tensor:
        meanwhile()
        if self.stepping is None:
            return self._compute(to_batch(rows, self._device))
        self.stepping.begin_step()
        try:
            return self._compute(to_batch(rows, self._device))
        finally:
            self.stepping.end_step()
