"""Composed: where the larger ops of a layer are smaller ones in a row."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from everserve.model import shard_choice
from everserve.model.batch import StepBatch
from everserve.model.ops import ExpertSlots, Join, LatentWeights, NextNorm, Scores
from everserve.model.quantised import Matrix
from everserve.model.rope import Rotation
from everserve.model.shard_choice import Choice
from everserve.model.spec import Norm
from everserve.model.whole_layers import LayerWeights, WholeLayers


class _Parts(Protocol):
    activation_dtype: torch.dtype

    def linear(
        self,
        x_TD: Tensor,
        weight_OD: Matrix,
        bias_O: Tensor | None = None,
        residual_TO: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """scale * (x @ weight.T (+ bias)) (+ residual)."""

    def norm(self, x_TD: Tensor, weight_D: Tensor, norm: Norm) -> Tensor: ...

    def join(self, x_TD: Tensor, residual_TD: Tensor, join: Join) -> Tensor: ...

    def rotate_and_store(
        self,
        qkv_TX: Tensor,
        batch: StepBatch,
        kv_pool: Tensor,
        layer: int,
        rotation: Rotation,
    ) -> Tensor:
        """Split qkv rows, norm and rotate q and k, write k and v into the pool at batch.kv_slots, return q_THE."""

    def turn_and_store(
        self, q_TX: Tensor, kv_TC: Tensor, weights: LatentWeights, batch: StepBatch, kv_pool: Tensor, layer: int
    ) -> Tensor:
        """Norm and rotate the latent rows, write them into the pool; return q_THC as it meets them: of each head first
        keys^T q, then what is rotated."""

    def attend(self, q_THE: Tensor, batch: StepBatch, kv_pool: Tensor, layer: int, scores: Scores) -> Tensor: ...

    def by_head(self, x_TX: Tensor, weight_HOK: Tensor) -> Tensor:
        """The product of each head with its own matrix."""

    def expert_rows(self, x_TD: Tensor, token_R: Tensor, slot_R: Tensor, slots: ExpertSlots) -> Tensor: ...

    def sigmoid(self, x: Tensor) -> Tensor:
        """The sigmoid of each number."""

    def combine(self, rows_TKD: Tensor, weights_TK: Tensor, residual_TD: Tensor) -> Tensor: ...


class Composed:
    """Half of an `Ops`; the other half has the smaller ones."""

    def embed(self: _Parts, tokens_T: Tensor, embedding_VD: Tensor, scale: float = 1.0) -> Tensor:
        return embedding_VD.index_select(0, tokens_T).to(self.activation_dtype) * scale

    def softcap(self, logits_LV: Tensor, cap: float) -> Tensor:
        return torch.tanh(logits_LV / cap) * cap

    def nothing(self, x_TD: Tensor) -> Tensor:
        return torch.zeros_like(x_TD)

    def as_input(self, x_TD: Tensor) -> Tensor:
        return x_TD

    def weigh_rows(self, x_TD: Tensor, weights_TS: Tensor) -> tuple[Tensor, Tensor]:
        return x_TD * weights_TS[:, :1], torch.ones_like(weights_TS)

    def all_slices(self, positions_T: Tensor, num_slices: int, weight: float = 1.0) -> Choice:
        return shard_choice.all_slices(positions_T, num_slices, weight)

    def sliced(self, ids_TK: Tensor, weights_TK: Tensor, num_slices: int) -> Choice:
        return shard_choice.sliced(ids_TK, weights_TK, num_slices)

    def whole_layers(self, layers: Sequence[LayerWeights]) -> WholeLayers | None:
        return None

    def project_and_store(
        self: _Parts,
        x_TD: Tensor,
        qkv_XD: Matrix,
        bias_X: Tensor | None,
        batch: StepBatch,
        kv_pool: Tensor,
        layer: int,
        rotation: Rotation,
    ) -> Tensor:
        qkv_TX = self.linear(x_TD, qkv_XD, bias_X)
        return self.rotate_and_store(qkv_TX, batch, kv_pool, layer, rotation)

    def latent(
        self: _Parts,
        x_TD: Tensor,
        weights: LatentWeights,
        batch: StepBatch,
        kv_pool: Tensor,
        layer: int,
        scores: Scores,
    ) -> Tensor:
        q_TQ = x_TD
        if weights.q_down_QD is not None and weights.q_norm_Q is not None:
            q_TQ = self.linear(x_TD, weights.q_down_QD, weights.q_down_bias_Q)
            q_TQ = self.norm(q_TQ, weights.q_norm_Q, weights.norm)
        q_TX = self.linear(q_TQ, weights.q_XQ)
        kv_TC = self.linear(x_TD, weights.kv_down_CD, weights.kv_down_bias_C)
        q_THC = self.turn_and_store(q_TX, kv_TC, weights, batch, kv_pool, layer)
        attended_TX = self.attend(q_THC, batch, kv_pool, layer, scores)
        return self.by_head(attended_TX, weights.values_HVR)

    def project_and_norm(
        self: _Parts,
        x_TX: Tensor,
        weight_DX: Matrix,
        bias_D: Tensor | None,
        residual_TD: Tensor,
        join: Join,
        following: NextNorm | None,
    ) -> tuple[Tensor, Tensor]:
        if join.norm_D is None:
            residual_TD = self.linear(x_TX, weight_DX, bias_D, residual_TD, join.scale)
        else:
            residual_TD = self.join(self.linear(x_TX, weight_DX, bias_D), residual_TD, join)
        return residual_TD, residual_TD if following is None else self.norm(residual_TD, *following)

    def feed_forward(
        self: _Parts,
        x_TD: Tensor,
        slots: ExpertSlots,
        residual_TD: Tensor | None,
        gate_1D: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        num_tokens, num_slots = len(x_TD), slots.num_slots
        row_R = torch.arange(num_tokens * num_slots, dtype=torch.int32, device=x_TD.device)
        rows_RD = self.expert_rows(x_TD, row_R // num_slots, row_R % num_slots, slots)
        weights_TK = torch.full((num_tokens, num_slots), scale, device=x_TD.device)
        if gate_1D is not None:
            weights_TK = weights_TK * self.sigmoid(self.linear(x_TD, gate_1D))
        if residual_TD is None:
            residual_TD = torch.zeros_like(x_TD)
        return self.combine(rows_RD.view(num_tokens, num_slots, -1), weights_TK, residual_TD)
