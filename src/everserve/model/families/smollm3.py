"""SmolLM3: every fourth layer has no rotation."""

from dataclasses import replace

from everserve.model.families.family import Family
from everserve.model.families.reading import (
    FULL,
    SLIDING,
    dense,
    gqa,
    layer_types,
    layers_with_rope,
    model,
    no_mlp_bias,
    num_layers,
    rms_norm,
    window,
    without_rope,
)
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec


def read(f: Fields) -> ModelSpec:
    no_mlp_bias(f)
    f.ignore("max_window_layers")
    norm, num, bias = rms_norm(f), num_layers(f), f.flag("attention_bias", False)
    rotated, ffn = gqa(f, needs_kv_heads=False, qkv_bias=bias, output_bias=bias, default_theta=2e6), dense(f)
    has_rope = layers_with_rope(f, num)
    is_on, size = f.flag("use_sliding_window", False), window(f)
    default = [SLIDING if is_on and size is not None and not rope else FULL for rope in has_rope]
    kinds = layer_types(f, default)
    layers = []
    for rope, kind in zip(has_rope, kinds, strict=True):
        mixer = rotated if rope else without_rope(rotated)
        mixer = replace(mixer, window=size if is_on and kind == SLIDING else None)
        layers.append(LayerSpec(mixer=mixer, ffn=ffn, norm=norm))
    return model(f, layers, norm)


FAMILIES = (
    Family(architecture="SmolLM3ForCausalLM", models="SmolLM3", kinds="layers without rope", read=read, is_tied=True),
)
