"""AttentionHalf: one layer up to the seam and behind it, the half that belongs to a stream's home.

    hidden -> norm -> heads: qkv, rotate, store, attend -> output + hidden -> norm -> router ... | seam | ... experts
                                                           = residual         = normed

That is what most models do; steps (whole_layers.py) say what this one does. What crosses the seam is `normed` and the
choice of shards: of experts, the router's; of a dense FFN all slices, with weight 1. What comes back is added to
`residual`. In a model with experts a layer without does not cross it: its FFN is computed here, whole. So are experts
that every row goes to: no row travels to them, and they are summed up first.

Heads are reached through `Heads` (seam/heads.py): they are here (`MergedHeads`), or in other processes, and then their
weights are not loaded here.
"""

from dataclasses import replace

from torch import Tensor

from everserve.model.batch import StepBatch
from everserve.model.config import ModelConfig
from everserve.model.ops import Join, LatentWeights, NextNorm, Ops, RouterWeights, Scores
from everserve.model.rope import PositionTables
from everserve.model.shard_choice import Choice
from everserve.model.spec import Experts as ExpertsSpec
from everserve.model.spec import Gqa, Latent, LayerSpec, Norm
from everserve.model.weights import HomeWeights, Weights
from everserve.model.whole_layers import LayerWeights, Register, Step, StepKind, steps_of
from everserve.seam.experts import Experts
from everserve.seam.heads import Heads


def answer_scale(layer: LayerSpec) -> float:
    """What the answers of shards are multiplied with: what joins the residual behind a norm has its scale there."""
    return 1.0 if layer.has_answer_norm else layer.residual_scale


def scores_of(mixer: Gqa, sinks_H: Tensor | None) -> Scores:
    return Scores(mixer.scale, mixer.window or 0, mixer.chunk or 0, mixer.softcap or 0.0, sinks_H)


class MergedHeads:
    """All heads of one layer, computed together."""

    def __init__(
        self, layer: int, spec: LayerSpec, mixer: Gqa, weights: HomeWeights, ops: Ops, tables: PositionTables
    ) -> None:
        self._layer = layer
        self._ops = ops
        self.qkv_XD = weights.matrix("qkv")
        self.qkv_bias_X = weights.load("qkv_bias")
        self.scores = scores_of(mixer, weights.load("sinks"))
        norms = weights.load("q_norm"), weights.load("k_norm")
        self.rotation = tables.rotation(mixer, *norms, spec.norm.eps, spec.norm.offset)

    def __call__(self, normed_TD: Tensor, batch: StepBatch, kv_pool: Tensor) -> Tensor:
        """Write the rows' KV into the pool; attended_TX."""
        q_THE = self._ops.project_and_store(
            normed_TD, self.qkv_XD, self.qkv_bias_X, batch, kv_pool, self._layer, self.rotation
        )
        return self._ops.attend(q_THE, batch, kv_pool, self._layer, self.scores)


class LatentHeads:
    """All heads of one layer that share a latent row of each token."""

    def __init__(self, layer: int, mixer: Latent, weights: HomeWeights, ops: Ops, tables: PositionTables) -> None:
        self._layer = layer
        self._ops = ops
        self._scores = Scores(mixer.scale, value_size=mixer.kv_rank)
        up_HXR = weights.need("kv_up").view(mixer.num_heads, mixer.plain_size + mixer.value_size, mixer.kv_rank)
        self._weights = LatentWeights(
            weights.matrix("q"),
            weights.matrix("kv_down"),
            weights.need("kv_norm"),
            up_HXR[:, : mixer.plain_size].transpose(1, 2).contiguous(),
            up_HXR[:, mixer.plain_size :],
            Norm(eps=mixer.norm_eps),
            *tables.latent(mixer),
            weights.matrix("q_down") if mixer.q_rank is not None else None,
            weights.load("q_norm"),
            weights.load("q_down_bias"),
            weights.load("kv_down_bias"),
        )

    def __call__(self, normed_TD: Tensor, batch: StepBatch, kv_pool: Tensor) -> Tensor:
        """Write the rows' latent rows into the pool; attended_TX."""
        return self._ops.latent(normed_TD, self._weights, batch, kv_pool, self._layer, self._scores)


def _heads(
    layer: int, spec: LayerSpec, weights: HomeWeights, ops: Ops, tables: PositionTables
) -> MergedHeads | LatentHeads:
    if isinstance(spec.mixer, Latent):
        return LatentHeads(layer, spec.mixer, weights, ops, tables)
    return MergedHeads(layer, spec, spec.mixer, weights, ops, tables)


class AttentionHalf:
    """Norms, output projection, router or dense FFN of one layer; and its heads, unless they are elsewhere."""

    def __init__(
        self, layer: int, config: ModelConfig, weights: Weights, ops: Ops, tables: PositionTables | None
    ) -> None:
        """`tables`: None where heads are elsewhere."""
        self.layer = layer
        self.crosses_seam = config.crosses_seam(layer)
        self._cut = config.cut(layer)
        self._spec = spec = config.layers[layer]
        self._ops = ops
        self._steps = steps_of(spec, crosses_seam=self.crosses_seam)

        self.answer_scale = answer_scale(spec)
        home = weights.home(layer)
        names = {name for step in self._steps for name in (step.norm, step.following) if name}
        self._norms = {name: home.need(name) for name in sorted(names)}
        self.heads = _heads(layer, spec, home, ops, tables) if tables is not None else None
        self._output_DX = home.matrix("output")
        self._output_bias_D = home.load("output_bias")
        self._router, self._router_weights, self._dense_gate_1D = None, None, None
        if isinstance(spec.ffn, ExpertsSpec):
            self._router = replace(spec.ffn.router, scale=spec.ffn.router.scale * self.answer_scale)
            self._router_weights = RouterWeights(home.need("router"), home.load("router_bias"), home.load("correction"))
            self._dense_gate_1D = home.load("shared_gate")
        dense = config.dense_at_home(layer)
        self._dense = weights.feed_forward(layer, dense, ops) if dense is not None else None

    @property
    def weights(self) -> LayerWeights:
        """All of them. Only where heads are here, and have keys and values of their own."""
        heads, has_router = self.heads, self._router is not None
        assert isinstance(heads, MergedHeads), "heads are elsewhere, or of another kind"
        return LayerWeights(
            steps=self._steps,
            norms=self._norms,
            norm=self._spec.norm,
            qkv_XD=heads.qkv_XD,
            qkv_bias_X=heads.qkv_bias_X,
            rotation=heads.rotation,
            scores=heads.scores,
            output_DX=self._output_DX,
            output_bias_D=self._output_bias_D,
            residual_scale=self._spec.residual_scale,
            answer_scale=self.answer_scale,
            router=self._router,
            router_weights=self._router_weights,
            num_slices=self._cut.slices_per_expert if has_router else self._cut.num_shards,
            dense=self._dense,
            dense_gate_1D=self._dense_gate_1D,
            crosses_seam=self.crosses_seam,
        )

    def run(
        self,
        hidden_TD: Tensor,
        batch: StepBatch,
        heads: Heads,
        experts: Experts,
        slices: Choice | None,
        allowed_N: Tensor | None,
    ) -> Tensor:
        """hidden_TD for the next layer. `heads` store the rows' KV. `slices`: of a dense FFN, all of them. `allowed_N`:
        the experts to choose from; None: all."""
        rows: dict[Register, Tensor] = {Register.HIDDEN: hidden_TD}
        for step in self._steps:
            x, residual = rows[step.x], rows.get(step.residual)
            match step.kind:
                case StepKind.NORM:
                    rows[step.into] = self._ops.norm(x, self._norms[step.norm], self._spec.norm)
                case StepKind.HEADS:
                    x = x if step.x is Register.NORMED else self._ops.as_input(x)
                    rows[step.into] = heads(self.layer, x, batch)
                case StepKind.PROJECT:
                    assert residual is not None
                    following = NextNorm(self._norms[step.following], self._spec.norm) if step.following else None
                    rows[step.into], normed = self._ops.project_and_norm(
                        x, self._output_DX, self._output_bias_D, residual, self._join(step), following
                    )
                    if step.normed is not Register.NONE:
                        rows[step.normed] = normed if following is not None else self._ops.as_input(normed)
                case StepKind.DENSE:
                    assert self._dense is not None, f"layer {self.layer} has no FFN at home"
                    rows[step.into] = self._ops.feed_forward(
                        x, self._dense, residual, self._dense_gate_1D, self.answer_scale
                    )
                case StepKind.SEAM:
                    rows[step.into] = self._cross(x, residual, experts, slices, allowed_N)
                case StepKind.JOIN:
                    assert residual is not None
                    rows[step.into] = self._ops.join(x, residual, self._join(step))
        return rows[Register.HIDDEN]

    def _join(self, step: Step) -> Join:
        norm_D = self._norms[step.norm] if step.norm else None
        return Join(self._spec.residual_scale, norm_D, self._spec.norm if step.norm else None)

    def _cross(
        self,
        normed_TD: Tensor,
        residual_TD: Tensor | None,
        experts: Experts,
        slices: Choice | None,
        allowed_N: Tensor | None,
    ) -> Tensor:
        """What the shards answer, added to the residual."""
        ids_TK, weights_TK = self.route(normed_TD, slices, allowed_N)
        if self._router is not None and self._router.weighs_input:
            normed_TD, weights_TK = self._ops.weigh_rows(normed_TD, weights_TK)
        if residual_TD is None:
            residual_TD = self._ops.nothing(normed_TD)
        return experts(self.layer, ids_TK, weights_TK, normed_TD, residual_TD)

    def route(self, normed_TD: Tensor, slices: Choice | None, allowed_N: Tensor | None = None) -> Choice:
        """Which shards each row goes to. Only for layers that cross the seam."""
        if self._router is None or self._router_weights is None:
            assert slices is not None and slices[0].shape[1] == self._cut.num_shards
            return slices
        ids_TK, weights_TK = self._ops.route(normed_TD, self._router_weights, self._router, allowed_N)
        num_slices = self._cut.slices_per_expert
        return self._ops.sliced(ids_TK, weights_TK, num_slices) if num_slices > 1 else (ids_TK, weights_TK)
