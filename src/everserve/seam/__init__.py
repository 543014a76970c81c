"""The seam between attention and experts: what both kinds of devices have in common.

trust.py     who the expert workers are, which of them are trusted, and hence where each expert is
batching.py  when an expert worker starts computing, and what
outcomes.py  what became of an exchange, and what an answer says
captured.py  what a captured step needs of its experts

`ExpertIO` is the one interface through which attention reaches experts, wherever they are. How rows travel is a matter
of the device: backends/cpu and backends/cuda.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # who only sizes lanes does not need torch
    from torch import Tensor


class ExpertIO(Protocol):
    """Carries rows over the seam and back. Returns only complete results, whatever happened on the way."""

    def __call__(
        self, layer: int, ids_TK: "Tensor", weights_TK: "Tensor", hidden_TD: "Tensor", residual_TD: "Tensor"
    ) -> "Tensor":
        """residual + the weighted sum of the chosen experts' answers to each row of hidden; hidden_TD.

        `ids_TK` are logical experts. The answers are summed in the order of k, so that the result is the same, bit
        for bit, wherever the experts are.
        """
