"""What the families read alike. Everything that a file says and that is not built is refused by its name."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from everserve.model.fields import Fields
from everserve.model.spec import (
    Activation,
    ActivationKind,
    Dense,
    Experts,
    Gqa,
    LayerSpec,
    ModelSpec,
    Norm,
    RopeConfig,
    Router,
)

MAX_LAYERS, MAX_EXPERTS = 4096, 1 << 16  # far above any model; what a config says of more cannot be meant
_ROPE_FACTORS = (1e-6, 1e6)  # beyond them tables overflow
_ACTIVATIONS = {
    "silu": ActivationKind.SILU,
    "swish": ActivationKind.SILU,
    "gelu_pytorch_tanh": ActivationKind.GELU_TANH,
    "relu": ActivationKind.RELU,
}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def model(f: Fields, layers: Sequence[LayerSpec], norm: Norm, **changes: Any) -> ModelSpec:
    return ModelSpec(
        vocab_size=f.integer("vocab_size"),
        hidden_size=f.integer("hidden_size"),
        layers=tuple(layers),
        final_norm=norm,
        **changes,
    )


def num_layers(f: Fields) -> int:
    """Bounded before anything is made for each layer."""
    return f.integer("num_hidden_layers", maximum=MAX_LAYERS)


def rms_norm(f: Fields, name: str = "rms_norm_eps", **changes: Any) -> Norm:
    return Norm(eps=f.number(name), **changes)


def activation(f: Fields, name: str = "hidden_act", *kinds: str) -> Activation:
    """`kinds`: those that this family may have; silu alone, unless they are given."""
    kinds = kinds or ("silu",)
    if f.get(name) not in kinds:
        raise f.error(name, f"is not supported; only {' or '.join(kinds)} is")
    return Activation(kind=_ACTIVATIONS[f.get(name)])


def dense(f: Fields, name: str = "intermediate_size", *, has_bias: bool = False, **changes: Any) -> Dense:
    return Dense(size=f.integer(name), activation=changes.pop("activation", None) or activation(f), has_bias=has_bias)


def no_mlp_bias(f: Fields) -> None:
    f.expect("mlp_bias", False, reason="is not supported; use a model without biases in its MLP")


# -- attention ---------------------------------------------------------------------------------------------------------


def gqa(
    f: Fields,
    *,
    needs_kv_heads: bool = True,
    needs_head_dim: bool = False,
    partial: float = 1.0,
    default_theta: float = 1e4,
    **changes: Any,
) -> Gqa:
    """Full attention with rope, unless the changes say otherwise. `partial`, `default_theta`: of files that do not say
    which part of a head is rotated, and how fast."""
    num_heads, hidden = f.integer("num_attention_heads"), f.integer("hidden_size")
    # Where files leave it out it means one KV head per query head.
    num_kv_heads = f.integer("num_key_value_heads", None if needs_kv_heads else num_heads)
    size = head_size(f, num_heads, hidden, needs_head_dim)
    if num_heads % num_kv_heads:
        raise f.error("num_key_value_heads", f"must divide num_attention_heads ({num_heads}); correct the file")
    rotary_size = int(size * partial_factor(f, partial))
    if rotary_size % 2 or not 0 < rotary_size <= size:
        raise f.error("head_dim", f"gives {rotary_size} values to rotate; rotary embedding needs an even size")
    values = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": size,
        "scale": size**-0.5,
        "rope": changes.pop("rope") if "rope" in changes else rope(f, size=rotary_size, default_theta=default_theta),
        "rotary_size": rotary_size,
        **changes,
    }
    return Gqa(**values)


def without_rope(mixer: Gqa) -> Gqa:
    return replace(mixer, rope=None, rotary_size=0)


def head_size(f: Fields, num_heads: int, hidden: int, is_needed: bool = False) -> int:
    if not f.has("head_dim") and (is_needed or hidden % num_heads):
        raise f.error("head_dim", "cannot be derived from hidden_size and num_attention_heads; add it to the file")
    size = f.integer("head_dim", hidden // num_heads)
    if size % 2:
        raise f.error("head_dim", f"gives heads of {size}; rotary embedding needs an even size")
    return size


def layer_types(f: Fields, default: list[str], *kinds: str) -> tuple[str, ...]:
    """What attention each layer has."""
    kinds = kinds or (FULL, SLIDING)
    return f.choices("layer_types", len(default), kinds) if f.has("layer_types") else tuple(default)


def full_attention_only(f: Fields) -> None:
    if f.has("layer_types"):
        f.choices("layer_types", num_layers(f), (FULL,))


def window(f: Fields, default: int | None = None) -> int | None:
    """None: there is none."""
    if "sliding_window" in f.nulls:
        f.get("sliding_window")
        return None
    return f.integer("sliding_window", default) if default is not None or f.has("sliding_window") else None


def layers_with_rope(f: Fields, num: int) -> list[bool]:
    """All but each so-many-th one, unless the file names them."""
    every = f.integer("no_rope_layer_interval", 4)
    has_rope = f.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(num)]
    if not isinstance(has_rope, list) or len(has_rope) != num or not all(one in (0, 1) for one in has_rope):
        raise f.error("no_rope_layers", f"must be a list of num_hidden_layers ({num}) zeros and ones; correct the file")
    return [one == 1 for one in has_rope]


def pattern(num: int, every: int) -> list[str]:
    """Each so-many-th layer sees everything; 0: all of them."""
    return [FULL if not every or (i + 1) % every == 0 else SLIDING for i in range(num)]


# -- rotary embedding --------------------------------------------------------------------------------------------------

_ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"}
    | {"mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"}
    | {"short_mscale", "long_mscale"},
}
_SAME_KIND = {"su": "longrope"}


def rope_fields(f: Fields) -> Fields:
    """Both styles of file: rope_theta beside rope_scaling, or all of it in rope_parameters (transformers 5)."""
    both = f.object("rope_parameters"), f.object("rope_scaling")
    if both[0].values and both[1].values and both[0].values != both[1].values:
        raise f.error("rope_scaling", "and rope_parameters disagree; remove one of them")
    return both[0] if both[0].values else both[1]


def partial_factor(f: Fields, default: float = 1.0) -> float:
    """Which part of a head is rotated."""
    inner = rope_fields(f)
    found = f.number("partial_rotary_factor", default, maximum=1.0)
    return inner.number("partial_rotary_factor", found, maximum=1.0) if inner.has("partial_rotary_factor") else found


def rope(
    f: Fields, *, size: int, default_theta: float = 1e4, also: frozenset[str] = frozenset(), inner: Fields | None = None
) -> RopeConfig:
    """`size`: how many values of a head are rotated. `also`: keys that the family reads itself. `inner`: the object
    that says it, where there are several."""
    inner = rope_fields(f) if inner is None else inner
    stated = inner.get("rope_theta")
    if stated is not None and f.get("rope_theta", stated) != stated:
        raise f.error("rope_theta", f"and {inner.prefix}rope_theta disagree; remove one of them")
    theta = (inner if stated is not None else f).number("rope_theta", default_theta, above=1.0)
    return _scaled(inner, theta, f, size, also)


def _scaled(inner: Fields, theta: float, f: Fields, size: int, also: frozenset[str]) -> RopeConfig:
    kind = inner.get("rope_type", inner.get("type", "default"))
    kind = _SAME_KIND.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        name = "rope_type" if inner.has("rope_type") else "type"
        raise inner.error(name, f"is not supported; supported: {', '.join(_ROPE_KEYS)}")
    known = _ROPE_KEYS[kind] | also | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown := inner.values.keys() - known:
        raise inner.error(min(unknown), f"is not a known parameter of rope type {kind}; remove it or correct the file")
    if kind == "default":
        return RopeConfig(kind=kind, theta=theta)
    if kind == "longrope":
        return _longrope(inner, theta, f, size)
    factor = inner.number("factor", above=_ROPE_FACTORS[0], maximum=_ROPE_FACTORS[1])
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=factor)
    original = inner.integer("original_max_position_embeddings")
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if high <= low:
            raise inner.error("high_freq_factor", f"must be above low_freq_factor ({low:g}); correct the file")
        return RopeConfig(
            kind=kind, theta=theta, factor=factor, original_max_positions=original,
            low_freq_factor=low, high_freq_factor=high,
        )  # fmt: skip
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_positions=original,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        attention_factor=inner.optional_number("attention_factor"),
        mscale=inner.optional_number("mscale"),
        mscale_all_dim=inner.optional_number("mscale_all_dim"),
        truncate=inner.flag("truncate", True),
    )


def _longrope(inner: Fields, theta: float, f: Fields, size: int) -> RopeConfig:
    """Files say the original length inside or outside, and often leave the factor to be derived from it."""
    for name in ("short_mscale", "long_mscale"):
        inner.expect(name, 1.0, 1)
    longest = f.integer("max_position_embeddings")
    source = inner if inner.has("original_max_position_embeddings") else f
    original = source.integer("original_max_position_embeddings", longest)
    f.ignore("original_max_position_embeddings")
    each = ", one for each pair of what is rotated of a head (head_dim)"
    return RopeConfig(
        kind="longrope",
        theta=theta,
        factor=inner.number("factor", longest / original),
        original_max_positions=original,
        attention_factor=inner.optional_number("attention_factor"),
        short_factors=inner.numbers("short_factor", size // 2, each),
        long_factors=inner.numbers("long_factor", size // 2, each),
    )


# -- experts -----------------------------------------------------------------------------------------------------------


def agreeing(f: Fields, *names: str, maximum: int, default: int | None = None) -> int:
    """An integer that goes by several names; where the file has more than one, they must say the same."""
    found = [name for name in names if f.has(name)] or [names[0]]
    value = f.integer(found[-1], default, maximum=maximum)
    for name in found[:-1]:
        if f.integer(name, maximum=maximum) != value:
            raise f.error(name, f"and {found[-1]} ({value}) disagree; remove one of them")
    return value


def experts(f: Fields, size: str, router: Router, *numbers: str, **changes: Any) -> Experts:
    """`numbers`: the fields that say how many there are."""
    number = agreeing(f, *numbers, maximum=MAX_EXPERTS)
    if router.top_k > number:
        raise f.error("num_experts_per_tok", f"is more than the {number} experts; correct the file")
    if number % router.num_groups or not 1 <= router.groups_kept <= router.num_groups:
        raise f.error("n_group", f"must divide {numbers[0]} ({number}), and be at least topk_group; correct the file")
    if router.num_groups > 1 and router.top_k > number // router.num_groups * router.groups_kept:
        of = f"of n_group ({router.num_groups}) leaves fewer of {numbers[0]} ({number})"
        raise f.error("topk_group", f"{of} than num_experts_per_tok ({router.top_k}); correct the file")
    kind = changes.pop("activation", None) or activation(f)
    return Experts(number=number, size=f.integer(size), router=router, activation=kind, **changes)


def sparse_layers(f: Fields) -> list[bool]:
    """Which layers have experts, where a file says every how many, and which not."""
    num, step = num_layers(f), f.integer("decoder_sparse_step", 1)
    left_out = f.get("mlp_only_layers", [])
    if not isinstance(left_out, list) or not all(type(i) is int and 0 <= i < num for i in left_out):
        raise f.error("mlp_only_layers", f"must be a list of layers below {num}; correct the file")
    return [i not in set(left_out) and (i + 1) % step == 0 for i in range(num)]
