"""How tensors travel.

    local.py    both halves in one process: no travel at all
    remote.py   over lanes to expert workers, which may die: replay, and the same result bit for bit
    trust.py    who these are, who of them is trusted, and hence where each expert is
    peers.py    their lanes in host memory
    serve.py    the expert worker's end
    lane.py     the memory between two workers, and how it is laid out
    memory.py   expert workers in the same process, with faults on demand
    csrc/       both ends in C: one call per layer on either side
    captured.py what a captured step needs of its experts
    cuda/       all of that in the memory of a GPU, by kernels

`ExpertIO` is the one interface through which attention reaches experts, wherever they are.
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
