"""ModelConfig: what one Hugging Face model directory says about its model, checked.

Fail closed: a field that would change the numbers and that we do not implement, or cannot read, is a ModelError of
one line that names the file, the field and what to do. Nothing here needs torch, so that the gateway and the planners
can read a config cheaply.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from everserve.config.model import ModelSource
from everserve.errors import ModelError
from everserve.model.cut import cut_dense, cut_experts, slices_per_expert
from everserve.model.fields import Fields
from everserve.tables.calls import Call, FfnCut, ShardKind

DTYPES = ("float32", "bfloat16", "float16")


class Architecture(StrEnum):
    """The architectures we implement, by the name that config.json gives them."""

    LLAMA = "LlamaForCausalLM"
    MIXTRAL = "MixtralForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"
    QWEN3_MOE = "Qwen3MoeForCausalLM"


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. `kind` says which of the other fields mean something."""

    kind: str  # default | linear | llama3 | yarn
    theta: float
    factor: float = 1.0  # linear, llama3, yarn
    original_max_positions: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn, as are all below
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: derived from the factor
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything the model's arithmetic depends on, and nothing else."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int  # of the dense layers
    num_experts: int  # 0 in a dense model
    experts_per_token: int
    expert_intermediate_size: int
    renormalise: bool  # whether the weights of the chosen experts are scaled to sum to 1
    moe_layers: tuple[int, ...]  # ascending
    qk_norm: bool
    attention_bias: bool
    tie_word_embeddings: bool
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    dtype: str  # one of DTYPES
    eos_token_ids: tuple[int, ...]
    tensor_parallel: bool = (
        False  # experts are cut where there are few, and dense FFNs of MoE models cross the seam too
    )

    divides_heads: bool = False  # heads are shards too

    @classmethod
    def from_source(cls, source: ModelSource) -> "ModelConfig":
        """As an instance serves it."""
        found = cls.from_directory(source.directory)
        return replace(found, tensor_parallel=source.tensor_parallel, divides_heads=source.divides_heads)

    @classmethod
    def from_directory(cls, path: str | Path) -> "ModelConfig":
        """Read config.json, and the end-of-sequence ids of generation_config.json where it has some."""
        directory = Path(path)
        if not directory.is_dir():
            raise ModelError(f"{directory} is not a directory; give the path of a Hugging Face model directory")
        fields = Fields.from_file(directory / "config.json")
        architecture = _architecture(fields)
        _refuse_unsupported(fields, architecture)
        num_heads = fields.integer("num_attention_heads")
        rope = _rope(fields)
        vocab_size = fields.integer("vocab_size")
        config = cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=fields.integer("hidden_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            # Only old Llama files leave this out, and there it means one KV head per query head.
            num_kv_heads=fields.integer(
                "num_key_value_heads", num_heads if architecture is Architecture.LLAMA else None
            ),
            head_size=_head_size(fields, architecture, num_heads),
            intermediate_size=fields.integer("intermediate_size"),
            **_moe(fields, architecture),
            qk_norm=architecture in (Architecture.QWEN3, Architecture.QWEN3_MOE),
            attention_bias=fields.flag("attention_bias", False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            rms_norm_eps=fields.number("rms_norm_eps"),
            max_position_embeddings=_max_position_embeddings(fields, rope),
            rope=rope,
            dtype=_dtype(fields),
            eos_token_ids=_eos_token_ids(directory, fields, vocab_size),
        )
        if config.num_heads % config.num_kv_heads:
            raise fields.error(
                "num_key_value_heads", f"must divide the {config.num_heads} attention heads; correct the file"
            )
        return config

    def is_moe_layer(self, layer: int) -> bool:
        return layer in self.moe_layers

    def crosses_seam(self, layer: int) -> bool:
        """Whether the FFN of this layer is one of the calls of a step, and may be computed by other workers. In models
        with experts the dense layers are few and stay at home, unless everything is to be divided."""
        return self.tensor_parallel or not self.moe_layers or self.is_moe_layer(layer)

    def cut(self, layer: int) -> FfnCut:
        """How the FFN of this layer is cut into shards."""
        if not self.is_moe_layer(layer):
            return cut_dense(layer, self.intermediate_size)
        num_experts, size = self.num_experts, self.expert_intermediate_size
        slices = slices_per_expert(num_experts, size) if self.tensor_parallel else 1
        return cut_experts(layer, num_experts, self.experts_per_token, size, slices)

    @cached_property
    def cuts(self) -> tuple[FfnCut, ...]:
        """Of all layers that cross the seam: the calls of a step, in order."""
        return tuple(self.cut(layer) for layer in range(self.num_layers) if self.crosses_seam(layer))

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """All calls of a step, in order. Where heads are divided a layer has two, and calls are numbered; else each FFN
        is the call with its layer's number."""
        if not self.divides_heads:
            return tuple(cut.call for cut in self.cuts)
        ffn = {cut.layer: cut.call for cut in self.cuts}
        heads = (Call(layer=i, kind=ShardKind.HEAD, num_shards=self.num_kv_heads) for i in range(self.num_layers))
        return tuple(call for head in heads for call in (head, ffn.get(head.layer)) if call is not None)

    @property
    def call_numbers(self) -> tuple[int, ...]:
        return tuple(range(len(self.calls))) if self.divides_heads else self.call_layers

    def numbers_of(self, *kinds: ShardKind) -> dict[int, int]:
        """By layer, the number of its call of one of these kinds."""
        numbered = zip(self.call_numbers, self.calls, strict=True)
        return {call.layer: number for number, call in numbered if call.kind in kinds}

    @property
    def call_layers(self) -> tuple[int, ...]:
        """The layer of each call."""
        return tuple(cut.layer for cut in self.cuts)

    @property
    def max_shards(self) -> int:
        """Of the call with the most."""
        return max(call.num_shards for call in self.calls)

    @property
    def max_shards_per_token(self) -> int:
        """Of the call with the most."""
        return max(cut.shards_per_token for cut in self.cuts)


def _architecture(fields: Fields) -> Architecture:
    known = ", ".join(Architecture)
    names = fields.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise fields.error("architectures", f"must name one architecture; supported: {known}")
    try:
        return Architecture(names[0])
    except ValueError:
        raise fields.error("architectures", f"is not supported; serve a model that is one of {known}") from None


def _refuse_unsupported(fields: Fields, architecture: Architecture) -> None:
    """Everything that would change the numbers and that no kernel of ours implements."""
    if fields.values.get("hidden_act") != "silu":
        raise fields.error("hidden_act", "is not supported; only silu is")
    if "quantization_config" in fields.values:
        raise fields.error("quantization_config", "is not supported; use the checkpoint that is not quantised")
    if fields.flag("mlp_bias", False):
        raise fields.error("mlp_bias", "is not supported; use a model without biases in its MLP")
    if architecture is Architecture.MIXTRAL and fields.flag("attention_bias", False):
        raise fields.error("attention_bias", "is not a property of Mixtral models; remove it or correct the file")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "is not supported; only 1.0 is")
    _refuse_sliding_window(fields, architecture)


def _refuse_sliding_window(fields: Fields, architecture: Architecture) -> None:
    advice = "means sliding-window attention, which is not supported; use a model with full attention"
    layer_types = fields.values.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise fields.error("layer_types", "must hold only full_attention; other kinds are not supported")
    if architecture in (Architecture.QWEN3, Architecture.QWEN3_MOE):
        # Qwen's files carry a window size even when it is switched off.
        if fields.flag("use_sliding_window", False):
            raise fields.error("use_sliding_window", advice)
        return
    max_positions = fields.integer("max_position_embeddings")
    if fields.integer("sliding_window", max_positions) < max_positions:
        raise fields.error("sliding_window", advice)


def _head_size(fields: Fields, architecture: Architecture, num_heads: int) -> int:
    hidden_size = fields.integer("hidden_size")
    # Qwen3's heads are not hidden_size / num_heads wide; its files always say how wide they are.
    if "head_dim" not in fields.values and (architecture is Architecture.QWEN3 or hidden_size % num_heads):
        raise fields.error("head_dim", "cannot be derived from hidden_size and num_attention_heads; add it to the file")
    head_size = fields.integer("head_dim", hidden_size // num_heads)
    if head_size % 2:
        raise fields.error("head_dim", f"gives heads of {head_size}; rotary embedding needs an even size")
    return head_size


def _moe(fields: Fields, architecture: Architecture) -> dict[str, Any]:
    """The fields of ModelConfig that are about experts."""
    num_layers = fields.integer("num_hidden_layers")
    if architecture is Architecture.MIXTRAL:
        renormalise, moe_layers, size_name = True, tuple(range(num_layers)), "intermediate_size"
        num_names = ("num_local_experts", "num_experts")
    elif architecture is Architecture.QWEN3_MOE:
        renormalise, moe_layers = fields.flag("norm_topk_prob"), _sparse_layers(fields, num_layers)
        # The hub's files say num_experts, transformers 5 writes num_local_experts.
        size_name, num_names = "moe_intermediate_size", ("num_experts", "num_local_experts")
    else:
        moe_layers = ()
    if not moe_layers:
        nothing = {"num_experts": 0, "experts_per_token": 0, "expert_intermediate_size": 0}
        return {**nothing, "renormalise": False, "moe_layers": ()}
    num_experts = _agreeing(fields, *num_names)
    experts_per_token = fields.integer("num_experts_per_tok")
    if experts_per_token > num_experts:
        raise fields.error("num_experts_per_tok", f"is more than the {num_experts} experts; correct the file")
    return {
        "num_experts": num_experts,
        "experts_per_token": experts_per_token,
        "expert_intermediate_size": fields.integer(size_name),
        "renormalise": renormalise,
        "moe_layers": moe_layers,
    }


def _sparse_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
        raise fields.error("mlp_only_layers", f"must be a list of layers below {num_layers}; correct the file")
    return tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)


def _agreeing(fields: Fields, name: str, alias: str) -> int:
    """An integer that goes by two names; where the file has both, they must say the same."""
    if alias not in fields.values:
        return fields.integer(name)
    value = fields.integer(alias)
    if fields.integer(name, value) != value:
        raise fields.error(name, f"and {alias} ({value}) disagree; remove one of them")
    return value


_ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"}
    | {"mscale", "mscale_all_dim", "truncate"},
}


def _rope(fields: Fields) -> RopeConfig:
    """Both styles of file: rope_theta beside rope_scaling, or all of it in rope_parameters (transformers 5)."""
    both = fields.object("rope_parameters"), fields.object("rope_scaling")
    if both[0].values and both[1].values and both[0].values != both[1].values:
        raise fields.error("rope_scaling", "and rope_parameters disagree; remove one of them")
    rope = both[0] if both[0].values else both[1]
    if (
        "rope_theta" in rope.values
        and fields.values.get("rope_theta", rope.values["rope_theta"]) != rope.values["rope_theta"]
    ):
        raise fields.error("rope_theta", f"and {rope.prefix}rope_theta disagree; remove one of them")
    theta = (rope if "rope_theta" in rope.values else fields).number("rope_theta", above=1.0)

    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        name = "rope_type" if "rope_type" in rope.values else "type"
        raise rope.error(name, f"is not supported; supported: {', '.join(_ROPE_KEYS)}")
    unknown = rope.values.keys() - _ROPE_KEYS[kind] - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown:
        raise rope.error(min(unknown), f"is not a known parameter of rope type {kind}; remove it or correct the file")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("partial_rotary_factor", "is not supported; only 1.0 is")
    return _scaled_rope(rope, kind, theta)


def _scaled_rope(rope: Fields, kind: str, theta: float) -> RopeConfig:
    if kind == "default":
        return RopeConfig(kind=kind, theta=theta)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=factor)
    original = rope.integer("original_max_position_embeddings")
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"must be above low_freq_factor ({low:g}); correct the file")
        return RopeConfig(
            kind=kind, theta=theta, factor=factor, original_max_positions=original,
            low_freq_factor=low, high_freq_factor=high,
        )  # fmt: skip
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _max_position_embeddings(fields: Fields, rope: RopeConfig) -> int:
    """Qwen asks its users to switch YaRN on by adding rope_scaling alone, leaving the old maximum in the file."""
    stated = fields.integer("max_position_embeddings")
    return max(stated, int(rope.factor * rope.original_max_positions)) if rope.kind == "yarn" else stated


def _dtype(fields: Fields) -> str:
    name = "dtype" if "dtype" in fields.values else "torch_dtype"
    value = fields.values.get(name)
    if value not in DTYPES:
        raise fields.error(name, f"is not supported; supported: {', '.join(DTYPES)}")
    return str(value)


def _eos_token_ids(directory: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json takes precedence: chat models stop at more tokens than their config.json names."""
    generation_file = directory / "generation_config.json"
    generation = Fields.from_file(generation_file) if generation_file.exists() else fields
    source = generation if "eos_token_id" in generation.values else fields
    value = source.values.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise source.error("eos_token_id", f"must be a token id below {vocab_size} or a list of them; correct the file")
    return tuple(dict.fromkeys(ids))
