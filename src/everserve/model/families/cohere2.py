"""Command R7B and A: attention and FFN read the same norm; layers that see everything have no rotation."""

from dataclasses import replace

from everserve.model.families.family import Family
from everserve.model.families.reading import (
    SLIDING,
    dense,
    gqa,
    layer_types,
    model,
    num_layers,
    pattern,
    window,
    without_rope,
)
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec, Norm


def read(f: Fields) -> ModelSpec:
    for name, value in {"use_parallel_block": True, "use_gated_activation": True, "use_qk_norm": False}.items():
        f.expect(name, value)
    f.expect("use_embedding_sharing", True)
    f.expect("use_parallel_embedding", False, True)
    f.expect("rotary_pct", 1.0)
    f.expect("position_embedding_type", "rope_gptj")
    f.expect("order_of_interleaved_layers", "local_attn_first")
    f.ignore("head_dim_is_derived", "layer_switch")
    norm, bias = Norm(eps=f.number("layer_norm_eps"), is_centred=True), f.flag("attention_bias", False)
    rotated = gqa(f, needs_kv_heads=False, is_interleaved=True, qkv_bias=bias, output_bias=bias)
    every = f.integer("sliding_window_pattern", 4)
    kinds = layer_types(f, pattern(num_layers(f), every))
    whole = LayerSpec(mixer=without_rope(rotated), ffn=dense(f), norm=norm, has_ffn_norm=False, is_parallel=True)
    windowed = replace(whole, mixer=replace(rotated, window=window(f, 4096)))
    layers = [windowed if kind == SLIDING else whole for kind in kinds]
    return model(f, layers, replace(norm, scale=f.number("logit_scale", 0.0625)))


FAMILIES = (
    Family(
        architecture="Cohere2ForCausalLM",
        models="Command R7B, Command A",
        kinds="attention and FFN side by side, LayerNorm, windows in most layers, the others without rope",
        read=read,
        is_tied=True,
    ),
)
