"""Composed: where the larger ops of a layer are smaller ones in a row."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from everserve.model import shard_choice
from everserve.model.batch import StepBatch
from everserve.model.ops import ExpertSlots
from everserve.model.rope import Rotation
from everserve.model.shard_choice import Choice
from everserve.model.whole_layers import LayerWeights, WholeLayers


class _Parts(Protocol):
    activation_dtype: torch.dtype

    def linear(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None, residual_TO: Tensor | None = None
    ) -> Tensor:
        """x @ weight.T (+ bias) (+ residual)."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...

    def rotate_and_store(
        self,
        qkv_TX: Tensor,
        batch: StepBatch,
        kv_pool: Tensor,
        layer: int,
        rotation: Rotation,
    ) -> Tensor:
        """Split qkv rows, norm and rotate q and k, write k and v into the pool at batch.kv_slots, return q_THE."""

    def expert_rows(self, x_TD: Tensor, token_R: Tensor, slot_R: Tensor, slots: ExpertSlots) -> Tensor: ...

    def combine(self, rows_TKD: Tensor, weights_TK: Tensor, residual_TD: Tensor) -> Tensor: ...


class Composed:
    """Half of an `Ops`; the other half has the smaller ones."""

    def embed(self: _Parts, tokens_T: Tensor, embedding_VD: Tensor) -> Tensor:
        return embedding_VD.index_select(0, tokens_T).to(self.activation_dtype)

    def all_slices(self, positions_T: Tensor, num_slices: int) -> Choice:
        return shard_choice.all_slices(positions_T, num_slices)

    def sliced(self, ids_TK: Tensor, weights_TK: Tensor, num_slices: int) -> Choice:
        return shard_choice.sliced(ids_TK, weights_TK, num_slices)

    def whole_layers(self, layers: Sequence[LayerWeights]) -> WholeLayers | None:
        return None

    def project_and_store(
        self: _Parts,
        x_TD: Tensor,
        qkv_XD: Tensor,
        bias_X: Tensor | None,
        batch: StepBatch,
        kv_pool: Tensor,
        layer: int,
        rotation: Rotation,
    ) -> Tensor:
        qkv_TX = self.linear(x_TD, qkv_XD, bias_X)
        return self.rotate_and_store(qkv_TX, batch, kv_pool, layer, rotation)

    def project_and_norm(
        self: _Parts,
        x_TX: Tensor,
        weight_DX: Tensor,
        bias_D: Tensor | None,
        residual_TD: Tensor,
        norm_D: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        residual_TD = self.linear(x_TX, weight_DX, bias_D, residual_TD)
        return residual_TD, self.rms_norm(residual_TD, norm_D, eps)

    def feed_forward(self: _Parts, x_TD: Tensor, slots: ExpertSlots, residual_TD: Tensor) -> Tensor:
        num_tokens, num_slots = len(x_TD), slots.num_slots
        row_R = torch.arange(num_tokens * num_slots, dtype=torch.int32, device=x_TD.device)
        rows_RD = self.expert_rows(x_TD, row_R // num_slots, row_R % num_slots, slots)
        ones_TK = torch.ones(num_tokens, num_slots, device=x_TD.device)
        return self.combine(rows_RD.view(num_tokens, num_slots, -1), ones_TK, residual_TD)
