"""LocalExperts: both halves in one process; expert (or slice) e is in slot e."""

import torch
from torch import Tensor

from everserve.model.expert_half import ExpertHalf
from everserve.model.ops import ExpertSlots


class LocalExperts:
    """`Experts` without a wire: the answer that all other implementations must reproduce."""

    num_replayed_rows = 0

    def __init__(self, expert_half: ExpertHalf) -> None:
        assert expert_half.num_slots >= expert_half.config.max_shards
        self._experts = expert_half
        # By the number of experts per token, 0 0 0 1 1 1 2 2 2 ...: the token of each row. Smaller batches use the
        # beginning of it.
        self._token_R: dict[int, Tensor] = {}

    def begin_step(self, num_rows: int) -> None: ...

    def end_step(self) -> None: ...

    def rest(self) -> None: ...

    def slots(self, layer: int) -> ExpertSlots:
        """Where the experts of this layer are."""
        return self._experts.slots(layer)

    def __call__(
        self, layer: int, ids_TK: Tensor, weights_TK: Tensor, hidden_TD: Tensor, residual_TD: Tensor
    ) -> Tensor:
        num_tokens, top_k = ids_TK.shape
        num_rows = num_tokens * top_k
        token_R = self._token_R.get(top_k)
        if token_R is None or token_R.shape[0] < num_rows:
            row_R = torch.arange(num_rows, dtype=torch.int32, device=ids_TK.device)
            self._token_R[top_k] = token_R = row_R.div(top_k, rounding_mode="floor")
        rows_RD = self._experts.rows(layer, hidden_TD, token_R[:num_rows], ids_TK.view(num_rows))
        rows_TKD = rows_RD.view(num_tokens, top_k, hidden_TD.shape[1])
        return self._experts.ops.combine(rows_TKD, weights_TK, residual_TD)
