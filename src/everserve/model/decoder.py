"""Decoder: the whole model around the seam.

It holds everything but the experts. Those are reached through `Experts`, which are given to each forward pass, so that
the decoder is the same whether experts are in this process or in others. Likewise heads, through `Heads`: by default
all of them are here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from everserve.model.attention_half import AttentionHalf
from everserve.model.batch import StepBatch
from everserve.model.config import ModelConfig
from everserve.model.masks import ExpertMasks
from everserve.model.ops import Ops
from everserve.model.rope import PositionTables
from everserve.model.weights import Weights
from everserve.seam.experts import Experts
from everserve.seam.heads import Heads, StepRows
from everserve.tables.calls import ShardKind


class LocalHeads:
    """`Heads` without a wire: the answer that all other implementations must reproduce."""

    def __init__(self, layers: Sequence[AttentionHalf], kv_pool: Tensor) -> None:
        self._layers = layers
        self._kv_pool = kv_pool

    def __call__(self, layer: int, normed_TD: Tensor, batch: StepRows) -> Tensor:
        heads = self._layers[layer].heads
        assert heads is not None, "this decoder has no heads of its own"
        return heads(normed_TD, cast(StepBatch, batch), self._kv_pool)


class Decoder:
    """Embedding, layers, final norm, logits.

    Activations are what the ops compute with; the KV pool is as wide as the weights may be. Sequences may be
    `max_model_len` tokens long.
    `progress(done, total)` counts layers as they are loaded. `has_heads`: whether heads are computed here.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        max_model_len: int,
        *,
        progress: Callable[[int, int], None] | None = None,
        has_heads: bool = True,
    ) -> None:
        self.config = config
        self.ops = ops
        self.max_model_len = max_model_len
        self.kv_dtype = weights.dtype
        self.masks = ExpertMasks(config.moe_layers, config.num_experts, ops.device, ops.is_captured)
        tables = PositionTables(max_model_len, ops.device) if has_heads else None

        spec = config.spec
        self._embedding_scale = spec.embedding_scale
        if spec.embedding_scale_is_rounded:
            self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=weights.dtype).item()
        self._embedding_VD = weights.load(weights.layout.embedding)
        self._final_norm_D = weights.load(weights.layout.final_norm)
        # A tied head is a second view of the same mapping, or, once narrowed or moved, the same tensor.
        tied = config.tie_word_embeddings
        self._lm_head_VD = self._embedding_VD if tied else weights.load(weights.layout.lm_head)
        self._num_slices = max((cut.num_shards for cut in config.cuts if cut.kind is ShardKind.SLICE), default=0)
        self.layers: list[AttentionHalf] = []
        for layer in range(config.num_layers):
            self.layers.append(AttentionHalf(layer, config, weights, ops, tables))
            if progress is not None:
                progress(layer + 1, config.num_layers)
        scales = {
            half.answer_scale for half in self.layers if half.crosses_seam and not config.is_moe_layer(half.layer)
        }
        assert len(scales) <= 1, "the slices of all layers have one weight"
        self._slice_weight = next(iter(scales), 1.0)
        is_chain = has_heads and not config.has_latent_attention  # others go op by op
        self._whole_layers = ops.whole_layers([half.weights for half in self.layers]) if is_chain else None

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """The KV pool's shape (batch.py says why in this order); its dtype is `kv_dtype`."""
        kv = self.config.kv
        return (num_blocks, self.config.num_layers, kv.num_planes, kv.num_heads, block_size, kv.row_size)

    def forward(self, batch: StepBatch, kv: Tensor | Heads, experts: Experts) -> Tensor:
        """Compute all rows, store their KV, return logits_LV (float32) of the rows asked for."""
        return self.logits(self.run(batch, kv, experts), batch.logits_rows_L)

    def run(self, batch: StepBatch, kv: Tensor | Heads, experts: Experts) -> Tensor:
        """All layers: hidden_TD. `kv`: the pool, or the heads that have one."""
        hidden_TD = self.ops.embed(batch.tokens_T, self._embedding_VD, self._embedding_scale)
        if self._whole_layers is not None and isinstance(kv, Tensor):
            return self._whole_layers(hidden_TD, batch, kv, experts, self.masks)
        heads: Heads = LocalHeads(self.layers, kv) if isinstance(kv, Tensor) else kv
        num, weight = self._num_slices, self._slice_weight
        slices = self.ops.all_slices(batch.positions_T, num, weight) if num else None
        for half in self.layers:
            hidden_TD = half.run(hidden_TD, batch, heads, experts, slices, self.masks.allowed(half.layer))
        return hidden_TD

    def logits(self, hidden_TD: Tensor, rows_L: Tensor) -> Tensor:
        """logits_LV of these rows."""
        spec = self.config.spec
        normed_LD = self.ops.norm(hidden_TD, self._final_norm_D, spec.final_norm, rows_L)
        logits_LV = self.ops.head(normed_LD, self._lm_head_VD)
        return logits_LV if spec.logits_softcap is None else self.ops.softcap(logits_LV, spec.logits_softcap)

    def pooled(self, hidden_TD: Tensor, rows: Sequence[int]) -> Tensor:
        """What stands for the tokens up to each of these rows: the final norm of its hidden state, without a scale that
        is meant for logits. Float32, in host memory."""
        rows_L = torch.tensor(rows, dtype=torch.int32 if self.ops.is_captured else torch.int64, device=hidden_TD.device)
        norm = replace(self.config.spec.final_norm, scale=1.0)
        return self.ops.norm(hidden_TD, self._final_norm_D, norm, rows_L).float().cpu()


class DecoderSteps:
    """A decoder's steps, computed when they are asked for. The hidden states of the last one stay."""

    def __init__(self, decoder: Decoder, kv: Tensor | Heads) -> None:
        self.kv = kv
        self._decoder = decoder
        self._hidden_TD = torch.empty(0)

    def compute(self, batch: StepBatch, experts: Experts) -> Tensor:
        """Logits, as `Decoder.forward`."""
        self._hidden_TD = self._decoder.run(batch, self.kv, experts)
        return self._decoder.logits(self._hidden_TD, batch.logits_rows_L)

    def pooled(self, rows: Sequence[int]) -> Tensor:
        """What these rows of the last step say: `Decoder.pooled`."""
        return self._decoder.pooled(self._hidden_TD, rows)
