"""Gemma 2: weights of norms are 1 + w, soft caps, windows in every other layer."""

from dataclasses import replace
from typing import Any

from everserve.model.families.family import Family
from everserve.model.families.names import Names
from everserve.model.families.reading import (
    FULL,
    SLIDING,
    activation,
    dense,
    gqa,
    layer_types,
    model,
    num_layers,
    rms_norm,
    window,
)
from everserve.model.families.windows import with_windows
from everserve.model.fields import Fields
from everserve.model.spec import Gqa, LayerSpec, ModelSpec

NAMES = Names(
    attention_norm="post_attention_layernorm.weight",
    ffn_norm="pre_feedforward_layernorm.weight",
    answer_norm="post_feedforward_layernorm.weight",
)


def gemma(f: Fields, mixers: list[Gqa]) -> ModelSpec:
    """What Gemma 2 and 3 have in common."""
    f.expect("use_bidirectional_attention", False)
    f.expect("hidden_act", "gelu_pytorch_tanh", "gelu", "silu")  # old files have it, and do not mean it
    norm = rms_norm(f, offset=1.0)
    ffn = dense(f, activation=activation(f, "hidden_activation", "gelu_pytorch_tanh"))
    layer = LayerSpec(mixer=mixers[0], ffn=ffn, norm=norm, has_attention_norm=True, has_answer_norm=True)
    return model(
        f,
        [replace(layer, mixer=mixer) for mixer in mixers],
        norm,
        embedding_scale=f.integer("hidden_size") ** 0.5,
        embedding_scale_is_rounded=True,
        logits_softcap=f.optional_number("final_logit_softcapping"),
    )


def attention(f: Fields, **changes: Any) -> Gqa:
    bias = f.flag("attention_bias", False)
    scale = f.number("query_pre_attn_scalar") ** -0.5
    softcap = f.optional_number("attn_logit_softcapping")
    return gqa(f, needs_head_dim=True, scale=scale, softcap=softcap, qkv_bias=bias, output_bias=bias, **changes)


def read(f: Fields) -> ModelSpec:
    kinds = layer_types(f, [FULL if i % 2 else SLIDING for i in range(num_layers(f))])
    size = window(f, 4096)
    return gemma(f, with_windows(attention(f), [size if kind == SLIDING else None for kind in kinds]))


FAMILIES = (
    Family(
        architecture="Gemma2ForCausalLM",
        models="Gemma 2",
        kinds="windows in some layers, soft caps, four norms of 1 + w, gelu, scaled embedding",
        read=read,
        is_tied=True,
        names=NAMES,
    ),
)
