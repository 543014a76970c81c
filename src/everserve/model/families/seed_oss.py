"""Seed-OSS: biases of q, k and v, and another flag for the output's."""

from everserve.model.families.family import Family
from everserve.model.families.reading import dense, full_attention_only, gqa, model, no_mlp_bias, num_layers, rms_norm
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec


def read(f: Fields) -> ModelSpec:
    full_attention_only(f)
    no_mlp_bias(f)
    norm = rms_norm(f)
    attention = gqa(
        f, needs_head_dim=True, qkv_bias=f.flag("attention_bias", True), output_bias=f.flag("attention_out_bias", False)
    )
    return model(f, [LayerSpec(mixer=attention, ffn=dense(f), norm=norm)] * num_layers(f), norm)


FAMILIES = (Family(architecture="SeedOssForCausalLM", models="Seed-OSS", kinds="biases", read=read),)
