"""Ministral: windows in some layers, or attention that is sharper at far positions."""

from dataclasses import replace

from everserve.model.families.family import Family
from everserve.model.families.reading import (
    FULL,
    SLIDING,
    dense,
    full_attention_only,
    gqa,
    head_size,
    layer_types,
    model,
    num_layers,
    rms_norm,
    rope,
    rope_fields,
    window,
)
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec, Temperature


def read_ministral(f: Fields) -> ModelSpec:
    norm, num, size = rms_norm(f), num_layers(f), window(f, 4096)
    attention, ffn = gqa(f, needs_kv_heads=False), dense(f)
    kinds = layer_types(f, [FULL if size is None else SLIDING] * num)
    mixers = [replace(attention, window=size if kind == SLIDING else None) for kind in kinds]
    return model(f, [LayerSpec(mixer=mixer, ffn=ffn, norm=norm) for mixer in mixers], norm)


def read_ministral3(f: Fields) -> ModelSpec:
    full_attention_only(f)
    norm, inner = rms_norm(f), rope_fields(f)
    size = head_size(f, f.integer("num_attention_heads"), f.integer("hidden_size"))
    also = frozenset({"llama_4_scaling_beta", "max_position_embeddings"})
    temperature = Temperature(
        every=inner.integer("original_max_position_embeddings"), beta=inner.number("llama_4_scaling_beta")
    )
    attention = gqa(f, rope=rope(f, size=size, also=also), window=window(f), temperature=temperature)
    return model(f, [LayerSpec(mixer=attention, ffn=dense(f), norm=norm)] * num_layers(f), norm)


FAMILIES = (
    Family(
        architecture="MinistralForCausalLM",
        models="Ministral 8B",
        kinds="sliding windows in some layers",
        read=read_ministral,
    ),
    Family(
        architecture="Ministral3ForCausalLM",
        models="Ministral 3",
        kinds="yarn, queries scaled by position",
        read=read_ministral3,
        wrapper="Mistral3ForConditionalGeneration",
        text_type="ministral3",
    ),
)
