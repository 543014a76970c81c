"""Llama 2 and 3, and what is built like them."""

from everserve.model.families.family import Family
from everserve.model.families.reading import dense, full_attention_only, gqa, model, no_mlp_bias, num_layers, rms_norm
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec


def read(f: Fields) -> ModelSpec:
    full_attention_only(f)
    no_mlp_bias(f)
    norm, bias = rms_norm(f), f.flag("attention_bias", False)
    attention = gqa(f, needs_kv_heads=False, qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(mixer=attention, ffn=dense(f), norm=norm)
    return model(f, [layer] * num_layers(f), norm)


FAMILIES = (Family(architecture="LlamaForCausalLM", models="Llama 2, 3", kinds="GQA, rope", read=read),)
