"""The one interface through which a step reaches its experts, wherever they are and whatever computes them.

                    backends/cpu                       backends/cuda
    this process    local_experts.py                   lanes/local_experts.py
    others          remote_experts.py                  lanes/remote_experts.py

Whatever happens on the way (a peer dies, hangs or refuses, an expert has moved) is healed behind it. On CPUs a call
returns when its layer is complete. On a GPU calls are recorded once and replayed in every step, and the step as a whole
is seen through (backends/cuda/captured.py). What is left to callers is StepAbandoned: an expert has no place now.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # modules that only name the interface do not need torch
    from torch import Tensor


class Experts(Protocol):
    """What a step needs of its experts."""

    @property
    def num_replayed_rows(self) -> int:
        """Rows that were sent to another worker because the first one did not answer."""

    def begin_step(self, num_rows: int) -> None:
        """A step of so many rows is about to call its first layer."""

    def __call__(
        self, layer: int, ids_TK: "Tensor", weights_TK: "Tensor", hidden_TD: "Tensor", residual_TD: "Tensor"
    ) -> "Tensor":
        """residual + the weighted sum of the chosen experts' answers to each row of hidden; hidden_TD.

        `ids_TK` are logical experts. The answers are summed in the order of k, so that the result is the same, bit
        for bit, wherever the experts are.
        """

    def end_step(self) -> None:
        """The step has ended, well or not."""

    def rest(self) -> None:
        """No step will come for a while: no expert worker should wait for us."""


class NoExperts:
    """Answers nothing: for a rehearsal before there are any, and for models without."""

    num_replayed_rows = 0

    def begin_step(self, num_rows: int) -> None: ...

    def __call__(
        self, layer: int, ids_TK: "Tensor", weights_TK: "Tensor", hidden_TD: "Tensor", residual_TD: "Tensor"
    ) -> "Tensor":
        return residual_TD

    def end_step(self) -> None: ...

    def rest(self) -> None: ...
