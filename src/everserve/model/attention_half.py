"""AttentionHalf: one layer up to the seam, the half that belongs to a stream's home.

    hidden -> norm -> heads: qkv, rotate, store, attend -> output + hidden -> norm -> router ... | seam | ... experts
                                                           = residual         = normed

What crosses the seam is `normed` and the choice of shards: of experts, the router's; of a dense FFN all slices, with
weight 1. What comes back is added to `residual`. In a model with experts a layer without does not cross it: its FFN is
computed here, from the same slices and in the same order, so that its bits are those that others would compute.

Heads are reached through `Heads` (seam/heads.py): they are here (`MergedHeads`), or in other processes, and then their
weights are not loaded here.
"""

from torch import Tensor

from everserve.model.batch import StepBatch
from everserve.model.config import ModelConfig
from everserve.model.layout import AttentionSources, Weights
from everserve.model.ops import Ops
from everserve.model.rope import RopeTables, Rotation
from everserve.model.shard_choice import Choice
from everserve.model.whole_layers import LayerWeights
from everserve.seam.heads import Heads


class MergedHeads:
    """All heads of one layer, computed together."""

    def __init__(
        self, layer: int, config: ModelConfig, weights: Weights, ops: Ops, rope: RopeTables, sources: AttentionSources
    ) -> None:
        self._layer = layer
        self._ops = ops
        self.scale = config.head_size**-0.5
        self.qkv_XD = weights.merge(sources.qkv)
        self.qkv_bias_X = weights.merge(sources.qkv_bias) if sources.qkv_bias else None
        q_norm_E, k_norm_E = weights.load_optional(sources.q_norm), weights.load_optional(sources.k_norm)
        self.rotation = Rotation(*rope, q_norm_E, k_norm_E, config.rms_norm_eps)

    def __call__(self, normed_TD: Tensor, batch: StepBatch, kv_pool: Tensor) -> Tensor:
        """Write the rows' KV into the pool; attended_TX."""
        q_THE = self._ops.project_and_store(
            normed_TD, self.qkv_XD, self.qkv_bias_X, batch, kv_pool, self._layer, self.rotation
        )
        return self._ops.attend(q_THE, batch, kv_pool, self._layer, self.scale)


class AttentionHalf:
    """Norms, output projection, router or dense FFN of one layer; and its heads, unless they are elsewhere."""

    def __init__(self, layer: int, config: ModelConfig, weights: Weights, ops: Ops, rope: RopeTables | None) -> None:
        """`rope`: None where heads are elsewhere."""
        self.layer = layer
        self.crosses_seam = config.crosses_seam(layer)
        self._cut = config.cut(layer)
        self._config = config
        self._ops = ops

        sources = weights.layout.attention(layer)
        self._input_norm_D = weights.load(sources.input_norm)
        self.heads = MergedHeads(layer, config, weights, ops, rope, sources) if rope is not None else None
        self._output_DX = weights.load(sources.output)
        self._output_bias_D = weights.load_optional(sources.output_bias)
        self._post_norm_D = weights.load(sources.post_norm)
        self._router_ND = weights.load(weights.layout.router(layer)) if config.is_moe_layer(layer) else None
        self._dense = None if self.crosses_seam else weights.feed_forward(layer, ops)

    @property
    def weights(self) -> LayerWeights:
        """All of them. Only where heads are here."""
        config, heads, has_router = self._config, self.heads, self._router_ND is not None
        assert heads is not None, "heads are elsewhere"
        num_slices = (
            1 if self._dense is not None else self._cut.slices_per_expert if has_router else self._cut.num_shards
        )
        return LayerWeights(
            input_norm_D=self._input_norm_D,
            qkv_XD=heads.qkv_XD,
            qkv_bias_X=heads.qkv_bias_X,
            rotation=heads.rotation,
            scale=heads.scale,
            output_DX=self._output_DX,
            output_bias_D=self._output_bias_D,
            post_norm_D=self._post_norm_D,
            eps=config.rms_norm_eps,
            router_ND=self._router_ND,
            top_k=config.experts_per_token if has_router else 1,
            renormalise=config.renormalise,
            num_slices=num_slices,
            dense=self._dense,
        )

    def attend(self, hidden_TD: Tensor, batch: StepBatch, heads: Heads) -> tuple[Tensor, Tensor]:
        """Attention by these heads, who store the rows' KV; (residual_TD, normed_TD)."""
        ops, eps = self._ops, self._config.rms_norm_eps
        attended_TX = heads(self.layer, ops.rms_norm(hidden_TD, self._input_norm_D, eps), batch)
        return ops.project_and_norm(
            attended_TX, self._output_DX, self._output_bias_D, hidden_TD, self._post_norm_D, eps
        )

    def route(self, normed_TD: Tensor, slices: Choice | None, allowed_N: Tensor | None = None) -> Choice:
        """Which shards each row goes to. Only for layers that cross the seam. `slices`: of a dense FFN, all of them.
        `allowed_N`: the experts to choose from; None: all."""
        if self._router_ND is None:
            assert slices is not None and slices[0].shape[1] == self._cut.num_shards
            return slices
        config = self._config
        ids_TK, weights_TK = self._ops.route(
            normed_TD, self._router_ND, config.experts_per_token, config.renormalise, allowed_N
        )
        num_slices = self._cut.slices_per_expert
        return self._ops.sliced(ids_TK, weights_TK, num_slices) if num_slices > 1 else (ids_TK, weights_TK)

    def feed_forward(self, normed_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """The rest of a layer that does not cross the seam: hidden_TD."""
        assert self._dense is not None, f"layer {self.layer} crosses the seam"
        return self._ops.feed_forward(normed_TD, self._dense, residual_TD)
