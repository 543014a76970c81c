"""Which tensor of which architecture is which weight of ours.

`Layout` names the tensors and says what shapes they must have; `check_checkpoint` compares that with a checkpoint's
headers before anything starts; `Weights` reads them. Experts come in two formats, and we read both:

    one by one   mlp.experts.7.gate_proj.weight [F, D], up_proj [F, D], down_proj [D, F]     the hub's files
                 (Mixtral: block_sparse_moe.experts.7.w1, w3, w2)
    stacked      mlp.experts.gate_up_proj [N, 2F, D], mlp.experts.down_proj [N, D, F]        transformers 5, on request
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from everserve.errors import ConfigError, ModelError
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import DTYPES, Architecture, ModelConfig
from everserve.model.ops import ExpertSlots, Ops
from everserve.tables.calls import ShardKind

_READABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one weight of ours lies: a tensor of the checkpoint, which must have this shape, or a part of it."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    plane: int | None = None
    rows: slice | None = None
    columns: slice | None = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of what is loaded: one plane, and these rows and columns of it."""
        shape = list(self.shape if self.plane is None else self.shape[1:])
        for axis, part in enumerate((self.rows, self.columns)):
            if part is not None:
                shape[axis] = len(range(*part.indices(shape[axis])))
        return tuple(shape)


@dataclass(frozen=True, kw_only=True)
class FeedForwardSources:
    """The three matrices of an expert, of a dense FFN, or of a slice of one."""

    gate: Source
    up: Source
    down: Source

    def slice(self, number: int, size: int) -> "FeedForwardSources":
        """Slice `number` of slices of this size."""
        first = number * size

        def rows(source: Source) -> Source:
            start = first + (source.rows.start if source.rows is not None else 0)
            return replace(source, rows=slice(start, start + size))

        down = replace(self.down, columns=slice(first, first + size))
        return FeedForwardSources(gate=rows(self.gate), up=rows(self.up), down=down)


@dataclass(frozen=True, kw_only=True)
class AttentionSources:
    """One layer's attention and its two norms. What a model does not have is None or empty."""

    input_norm: Source
    qkv: tuple[Source, Source, Source]
    qkv_bias: tuple[Source, ...]
    output: Source
    output_bias: Source | None
    q_norm: Source | None
    k_norm: Source | None
    post_norm: Source


@dataclass(frozen=True, kw_only=True)
class HeadSources:
    """One KV head of a layer with its query heads: parts of q, k and v, and what all heads of the layer share."""

    qkv: tuple[Source, Source, Source]
    qkv_bias: tuple[Source, ...]
    q_norm: Source | None
    k_norm: Source | None


class Layout:
    """The sources of all weights of one model, in the format that its checkpoint uses."""

    def __init__(self, config: ModelConfig, *, stacked_experts: bool) -> None:
        self.config = config
        self._stacked = stacked_experts
        hub_mixtral = config.architecture is Architecture.MIXTRAL and not stacked_experts
        self._moe_module = "block_sparse_moe" if hub_mixtral else "mlp"
        self._expert_names = ("w1", "w3", "w2") if hub_mixtral else ("gate_proj", "up_proj", "down_proj")

    @classmethod
    def of(cls, config: ModelConfig, checkpoint: Checkpoint) -> "Layout":
        return cls(config, stacked_experts=any(name.endswith(".experts.gate_up_proj") for name in checkpoint.names()))

    @property
    def embedding(self) -> Source:
        return Source(name="model.embed_tokens.weight", shape=(self.config.vocab_size, self.config.hidden_size))

    @property
    def final_norm(self) -> Source:
        return Source(name="model.norm.weight", shape=(self.config.hidden_size,))

    @property
    def lm_head(self) -> Source:
        if self.config.tie_word_embeddings:
            return self.embedding
        return Source(name="lm_head.weight", shape=(self.config.vocab_size, self.config.hidden_size))

    def attention(self, layer: int) -> AttentionSources:
        c = self.config
        q_size, kv_size = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
        sizes = {"q": q_size, "k": kv_size, "v": kv_size}

        def weight(module: str, *shape: int) -> Source:
            return Source(name=f"model.layers.{layer}.{module}.weight", shape=shape)

        def bias(module: str, size: int) -> Source:
            return Source(name=f"model.layers.{layer}.{module}.bias", shape=(size,))

        q, k, v = (weight(f"self_attn.{part}_proj", size, c.hidden_size) for part, size in sizes.items())
        qkv_bias = tuple(bias(f"self_attn.{part}_proj", size) for part, size in sizes.items())
        return AttentionSources(
            input_norm=weight("input_layernorm", c.hidden_size),
            qkv=(q, k, v),
            qkv_bias=qkv_bias if c.attention_bias else (),
            output=weight("self_attn.o_proj", c.hidden_size, q_size),
            output_bias=bias("self_attn.o_proj", c.hidden_size) if c.attention_bias else None,
            q_norm=weight("self_attn.q_norm", c.head_size) if c.qk_norm else None,
            k_norm=weight("self_attn.k_norm", c.head_size) if c.qk_norm else None,
            post_norm=weight("post_attention_layernorm", c.hidden_size),
        )

    def head(self, layer: int, head: int) -> HeadSources:
        """Consecutive query heads share a KV head, so each part is a slice of rows."""
        c, whole = self.config, self.attention(layer)
        group_size, size = c.num_heads // c.num_kv_heads, c.head_size

        def part(sources: tuple[Source, ...]) -> Iterator[Source]:
            for source, num_rows in zip(sources, (group_size * size, size, size), strict=True):
                yield replace(source, rows=slice(head * num_rows, (head + 1) * num_rows))

        q, k, v = part(whole.qkv)
        return HeadSources(
            qkv=(q, k, v),
            qkv_bias=tuple(part(whole.qkv_bias)) if whole.qkv_bias else (),
            q_norm=whole.q_norm,
            k_norm=whole.k_norm,
        )

    def router(self, layer: int) -> Source:
        shape = (self.config.num_experts, self.config.hidden_size)
        return Source(name=f"model.layers.{layer}.{self._moe_module}.gate.weight", shape=shape)

    def dense(self, layer: int) -> FeedForwardSources:
        """The FFN of a layer without experts."""
        prefix, size = f"model.layers.{layer}.mlp", self.config.intermediate_size
        return self._feed_forward(prefix, ("gate_proj", "up_proj", "down_proj"), size)

    def shard(self, layer: int, shard: int) -> FeedForwardSources:
        """One shard of a layer's FFN, as the model is cut (model/cut.py)."""
        cut = self.config.cut(layer)
        if cut.kind is ShardKind.SLICE:
            return self.dense(layer).slice(shard, cut.shard_size)
        expert, part = divmod(shard, cut.slices_per_expert)
        whole = self.expert(layer, expert)
        return whole.slice(part, cut.shard_size) if cut.slices_per_expert > 1 else whole

    def expert(self, layer: int, expert: int) -> FeedForwardSources:
        prefix, size = (
            f"model.layers.{layer}.{self._moe_module}.experts",
            self.config.expert_intermediate_size,
        )
        if not self._stacked:
            return self._feed_forward(f"{prefix}.{expert}", self._expert_names, size)
        num_experts, hidden_size = self.config.num_experts, self.config.hidden_size
        gate_up, gate_up_shape = f"{prefix}.gate_up_proj", (num_experts, 2 * size, hidden_size)
        return FeedForwardSources(
            gate=Source(name=gate_up, shape=gate_up_shape, plane=expert, rows=slice(0, size)),
            up=Source(name=gate_up, shape=gate_up_shape, plane=expert, rows=slice(size, 2 * size)),
            down=Source(name=f"{prefix}.down_proj", shape=(num_experts, hidden_size, size), plane=expert),
        )

    def _feed_forward(self, prefix: str, names: tuple[str, str, str], size: int) -> FeedForwardSources:
        gate, up, down = names
        hidden_size = self.config.hidden_size
        return FeedForwardSources(
            gate=Source(name=f"{prefix}.{gate}.weight", shape=(size, hidden_size)),
            up=Source(name=f"{prefix}.{up}.weight", shape=(size, hidden_size)),
            down=Source(name=f"{prefix}.{down}.weight", shape=(hidden_size, size)),
        )

    def all_sources(self) -> Iterator[Source]:
        """Every weight of the model."""
        yield from (self.embedding, self.final_norm, self.lm_head)
        for layer in range(self.config.num_layers):
            a = self.attention(layer)
            yield from (a.input_norm, *a.qkv, *a.qkv_bias, a.output, a.post_norm)
            yield from (source for source in (a.output_bias, a.q_norm, a.k_norm) if source is not None)
            if self.config.is_moe_layer(layer):
                yield self.router(layer)
                parts = [self.expert(layer, expert) for expert in range(self.config.num_experts)]
            else:
                parts = [self.dense(layer)]
            for part in parts:
                yield from (part.gate, part.up, part.down)


def check_checkpoint(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise ModelError unless the checkpoint holds exactly the tensors that the config calls for. Reads no tensor."""
    expected = {source.name: source.shape for source in Layout.of(config, checkpoint).all_sources()}
    present = checkpoint.names()
    for name, shape in expected.items():
        if name not in present:
            num_missing = len(expected.keys() - present)
            raise ModelError(
                f"{checkpoint.path} lacks tensor {name} ({num_missing} missing in all); "
                "the download is incomplete or config.json is another model's"
            )
        if checkpoint.shape(name) != shape:
            raise ModelError(
                f"{checkpoint.path}: tensor {name} has shape {list(checkpoint.shape(name))}, "
                f"but config.json calls for {list(shape)}; one of the two is another model's"
            )
        if checkpoint.dtype(name) not in _READABLE:
            raise ModelError(
                f"{checkpoint.path}: tensor {name} is {_name(checkpoint.dtype(name))}, "
                f"which is not supported; convert the weights to one of {', '.join(DTYPES)}"
            )
    # A weight that we would leave out changes the model. Old files carry rotary tables, which we compute; a tied
    # model may carry its embedding twice.
    for name in sorted(present - expected.keys()):
        if not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight":
            raise ModelError(
                f"{checkpoint.path} holds tensor {name}, which {config.architecture} with this config.json "
                "does not use; one of the two is another model's"
            )


def resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """The dtype of the KV pool, and the widest that weights are kept in. "auto" is what config.json says."""
    if name != "auto" and name not in DTYPES:
        raise ConfigError(f"dtype {name} is not supported; choose auto, {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, config.dtype if name == "auto" else name)
    return dtype


class Weights:
    """A checkpoint's weights as one device wants them: no wider than `dtype`, never widened.

    A weight that is as narrow as asked for, or narrower, stays a view of the mapped file: all ops read all three
    dtypes exactly, so widening would only cost memory.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: str, device: torch.device) -> None:
        self.layout = Layout.of(config, checkpoint)
        self.dtype = resolve_dtype(dtype, config)
        self._checkpoint = checkpoint
        self._device = device

    def load(self, source: Source) -> Tensor:
        return self.load_temporary(source)

    def load_temporary(self, source: Source) -> Tensor:
        """For a caller that copies it somewhere else."""
        tensor = self._checkpoint.part(source.name, source.plane, source.rows, source.columns)
        return tensor.to(self._device, self.dtype_of(source))

    def dtype_of(self, source: Source) -> torch.dtype:
        """What this weight is loaded as."""
        in_file = self._checkpoint.dtype(source.name)
        return self.dtype if self.dtype.itemsize < in_file.itemsize else in_file

    def load_optional(self, source: Source | None) -> Tensor | None:
        return None if source is None else self.load(source)

    def merge(self, sources: tuple[Source, ...]) -> Tensor:
        """Several weights on top of each other, copied into one."""
        return torch.cat([self.load(source) for source in sources])

    def feed_forward(self, layer: int, ops: Ops) -> ExpertSlots:
        """The FFN of a layer without experts that never crosses the seam, as a set of slots with a single slot: it is
        not cut, because no other worker has to compute the same bits in parts."""
        sources, slots = self.layout.dense(layer), ops.expert_slots(1)
        gate_FD, up_FD = self.load_temporary(sources.gate), self.load_temporary(sources.up)
        slots.fill(0, gate_FD, up_FD, self.load_temporary(sources.down))
        return slots


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
