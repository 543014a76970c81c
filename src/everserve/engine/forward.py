"""What the engine computes a step with: rows in, logits or tokens out, KV written on the way."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from everserve.engine.batching import Rows, to_batch
from everserve.model.batch import StepBatch
from everserve.seam.experts import Experts, NoExperts


class Pending(Protocol):
    """A step that was launched."""

    def read(self) -> Tensor | list[int]:
        """Its end: logits_LV of `rows.logits_rows_L`, or the tokens that were chosen from them (`Rows.draws_L`). If it
        raises, the step never happened, nor did a step that was launched behind it."""

    def pooled(self, rows: list[int]) -> Tensor:
        """What these rows' hidden states say (`Decoder.pooled`), in a step that has ended with logits, until the next
        one is launched."""

    @property
    def due_s(self) -> float:
        """When it should end, on the monotonic clock; in the past if that is not known."""

    def is_running_at(self, time_s: float) -> bool:
        """Wait until then. False, at once, when it has ended, or something must be done so that it does: read it."""


class Forward(Protocol):
    """One step after the other. A second one may be launched before the first has ended, not a third one."""

    chooses: bool  # tokens are chosen where logits are computed, if `Rows.draws_L` says how:
    draws: bool  # any token. Otherwise only the most likely ones

    @property
    def num_captures(self) -> int:
        """Graphs captured so far."""

    @property
    def may_go_ahead(self) -> bool:
        """Whether a step may be launched behind one that has not ended, with the tokens that it chooses
        (`Rows.sources_T`)."""

    def use_mask(self, masked: bytes) -> None:
        """The router leaves these experts out from now on: `Routes.masked`. Between two steps."""

    def launch(self, rows: Rows) -> Pending:
        """Begin a step. The host may do something else before it reads the end."""


class EagerForward:
    """Computed when the end is read, by the processor that would have to do everything else too. `experts` may be
    replaced between two steps."""

    num_captures = 0
    chooses = draws = False
    may_go_ahead = False

    def __init__(
        self,
        compute: Callable[[StepBatch, Experts], Tensor],
        device: torch.device,
        experts: Experts | None = None,
        use_mask: Callable[[bytes], None] = lambda masked: None,
        pooled: Callable[[list[int]], Tensor] | None = None,
    ) -> None:
        """`pooled`: of the last step; without it no stream can want that."""
        self.experts: Experts = experts or NoExperts()
        self._compute = compute
        self._device = device
        self.use_mask = use_mask
        self.pooled = pooled

    def launch(self, rows: Rows) -> "_EagerStep":
        return _EagerStep(self, rows)

    def run(self, rows: Rows) -> Tensor:
        self.experts.begin_step(len(rows.tokens_T))
        try:
            return self._compute(to_batch(rows, self._device), self.experts)
        finally:
            self.experts.end_step()


class _EagerStep:
    def __init__(self, forward: EagerForward, rows: Rows) -> None:
        self._forward = forward
        self._rows = rows

    due_s = 0.0

    def is_running_at(self, time_s: float) -> bool:
        return False

    def read(self) -> Tensor:
        return self._forward.run(self._rows)

    def pooled(self, rows: list[int]) -> Tensor:
        assert self._forward.pooled is not None, "this model has no hidden states"
        return self._forward.pooled(rows)
