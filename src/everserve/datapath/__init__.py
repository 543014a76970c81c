"""How tensors travel.

    local.py   both halves in one process: no travel at all

`ExpertIO` is the one interface through which attention reaches experts, wherever they are.
"""

from typing import Protocol

from torch import Tensor


class ExpertIO(Protocol):
    """Carries rows over the seam and back. Returns only complete results, whatever happened on the way."""

    def __call__(
        self, layer: int, ids_TK: Tensor, weights_TK: Tensor, hidden_TD: Tensor, residual_TD: Tensor
    ) -> Tensor:
        """residual + the weighted sum of the chosen experts' answers to each row of hidden; hidden_TD.

        `ids_TK` are logical experts. The answers are summed in the order of k, so that the result is the same, bit
        for bit, wherever the experts are.
        """
