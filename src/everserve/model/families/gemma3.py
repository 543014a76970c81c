"""Gemma 3: windows in most layers, which have a rotation of their own; norms of q and k."""

from dataclasses import replace

from everserve.model.families.family import Family
from everserve.model.families.gemma2 import NAMES, attention, gemma
from everserve.model.families.reading import SLIDING, head_size, layer_types, num_layers, pattern, rope, window
from everserve.model.fields import Fields
from everserve.model.spec import ModelSpec, QkNorm, RopeConfig

# What files leave out, those that hold images' weights too above all.
_UNSAID = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
}


def read(f: Fields) -> ModelSpec:
    f.assume(**_UNSAID)
    every = f.integer("sliding_window_pattern", 6)
    f.ignore("_sliding_window_pattern")  # transformers writes layer_types beside it
    kinds = layer_types(f, pattern(num_layers(f), every))
    size, (of_full, of_sliding) = window(f, 4096), _ropes(f)
    whole = attention(f, rope=of_full, qk_norm=QkNorm.HEAD)
    sliding = replace(whole, rope=of_sliding, window=size)
    return gemma(f, [sliding if kind == SLIDING else whole for kind in kinds])


def _ropes(f: Fields) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of layers that see everything, and of those with windows."""
    size = head_size(f, f.integer("num_attention_heads"), f.integer("hidden_size"))
    both = f.object("rope_parameters")
    if both.has("full_attention") or both.has("sliding_attention"):
        full, sliding = both.object("full_attention"), both.object("sliding_attention")
        ropes = rope(f, size=size, default_theta=1e6, inner=full), rope(f, size=size, inner=sliding)
        both.refuse_unread("Gemma 3")
        return ropes
    local = RopeConfig(kind="default", theta=f.number("rope_local_base_freq", 1e4, above=1.0))
    return rope(f, size=size, default_theta=1e6), local


FAMILIES = (
    Family(
        architecture="Gemma3ForCausalLM",
        models="Gemma 3 (text)",
        kinds="windows in most layers, two rotations, four norms of 1 + w, norms of q and k, gelu, scaled embedding",
        read=read,
        is_tied=True,
        names=NAMES,
        wrapper="Gemma3ForConditionalGeneration",
    ),
)
