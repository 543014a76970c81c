"""The one interface through which a step reaches its attention heads, wherever they and their KV are.

    this process    model/decoder.py (LocalHeads): all heads of a layer, and the KV pool, are here
    others          backends/cpu/remote_heads.py: each shard worker has some heads of each layer, and their KV

What comes back are *attended rows*: for each row of the step the results of all query heads, one after the other. A
head's result depends on that head's weights and KV alone, so it is the same, bit for bit, wherever the head is; there
is no sum over heads before the output projection, which stays with the caller.

A head's KV is in one place only. If that place is gone, or has lost its memory, a call raises KvLost: before the next
step the KV is fetched from elsewhere, or computed again (engine/regaining.py).
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # modules that only name the interface do not need torch
    from torch import Tensor


class StepRows(Protocol):
    """What heads need to know of the rows of a step (model/batch.py)."""

    @property
    def positions_T(self) -> "Tensor": ...  # noqa: N802 (letters are dimensions)
    @property
    def kv_slots_T(self) -> "Tensor": ...  # noqa: N802
    @property
    def query_starts_S(self) -> "Tensor": ...  # noqa: N802
    @property
    def block_tables_SB(self) -> "Tensor": ...  # noqa: N802


class Heads(Protocol):
    """What a step needs of its heads."""

    def __call__(self, layer: int, normed_TD: "Tensor", batch: StepRows) -> "Tensor":
        """Store the rows' KV, and attend: attended_TX, X = H * E. All calls of a step have the same batch."""


class NoHeads:
    """Answers zeros: for a rehearsal before there are any. `size`: of a row of answers."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, layer: int, normed_TD: "Tensor", batch: StepRows) -> "Tensor":
        return normed_TD.new_zeros(len(normed_TD), self._size)
