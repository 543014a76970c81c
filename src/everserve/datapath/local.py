"""LocalExperts: both halves in one process; expert e is in slot e."""

import torch
from torch import Tensor

from everserve.model.expert_half import ExpertHalf


class LocalExperts:
    """`ExpertIO` without a wire: the answer that all other implementations must reproduce."""

    def __init__(self, expert_half: ExpertHalf) -> None:
        assert expert_half.num_slots >= expert_half.config.num_experts
        self._experts = expert_half

    def __call__(
        self, layer: int, ids_TK: Tensor, weights_TK: Tensor, hidden_TD: Tensor, residual_TD: Tensor
    ) -> Tensor:
        num_tokens, top_k = ids_TK.shape
        token_T = torch.arange(num_tokens, dtype=torch.int32, device=ids_TK.device)
        rows_RD = self._experts.rows(layer, hidden_TD, token_T.repeat_interleave(top_k), ids_TK.flatten())
        rows_TKD = rows_RD.view(num_tokens, top_k, hidden_TD.shape[1])
        return self._experts.ops.combine(rows_TKD, weights_TK, residual_TD)
