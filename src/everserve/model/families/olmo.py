"""OLMo 2 and 3: norms behind attention and FFN only, norms of q and k over all heads; OLMo 3 has windows."""

from dataclasses import replace
from typing import Any

from everserve.model.families.family import Family
from everserve.model.families.names import Names
from everserve.model.families.reading import (
    SLIDING,
    dense,
    full_attention_only,
    gqa,
    head_size,
    layer_types,
    model,
    num_layers,
    pattern,
    rms_norm,
    rope,
    window,
)
from everserve.model.fields import Fields
from everserve.model.spec import Gqa, LayerSpec, ModelSpec, QkNorm

_NAMES = Names(attention_norm="post_attention_layernorm.weight", answer_norm="post_feedforward_layernorm.weight")


def _model(f: Fields, mixers: list[Gqa]) -> ModelSpec:
    norm = rms_norm(f)
    layer = LayerSpec(
        mixer=mixers[0], ffn=dense(f), norm=norm,
        has_input_norm=False, has_attention_norm=True, has_ffn_norm=False, has_answer_norm=True,
    )  # fmt: skip
    return model(f, [replace(layer, mixer=mixer) for mixer in mixers], norm)


def _attention(f: Fields, **changes: Any) -> Gqa:
    bias = f.flag("attention_bias", False)
    return gqa(f, needs_kv_heads=False, qk_norm=QkNorm.ROW, qkv_bias=bias, output_bias=bias, **changes)


def read_olmo2(f: Fields) -> ModelSpec:
    full_attention_only(f)
    return _model(f, [_attention(f)] * num_layers(f))


def read_olmo3(f: Fields) -> ModelSpec:
    size = head_size(f, f.integer("num_attention_heads"), f.integer("hidden_size"))
    both = f.object("rope_parameters")
    is_nested = both.has("full_attention") or both.has("sliding_attention")
    inner = [both.object(name) if is_nested else None for name in ("full_attention", "sliding_attention")]
    full, sliding = (rope(f, size=size, default_theta=5e5, inner=one) for one in inner)
    if not is_nested:  # of old files only the layers that see everything are scaled
        sliding = replace(full, kind="default")
    whole = _attention(f, rope=full)
    windowed = replace(whole, rope=sliding, window=window(f, 4096))
    kinds = layer_types(f, pattern(num_layers(f), 4))
    return _model(f, [windowed if kind == SLIDING else whole for kind in kinds])


FAMILIES = (
    Family(
        architecture="Olmo2ForCausalLM",
        models="OLMo 2",
        kinds="norms behind only, norms over all heads",
        read=read_olmo2,
        names=_NAMES,
    ),
    Family(
        architecture="Olmo3ForCausalLM",
        models="OLMo 3",
        kinds="norms behind only, norms over all heads, windows in most layers",
        read=read_olmo3,
        names=_NAMES,
    ),
)
