"""MiniCPM3: latent attention, longrope, scaled embedding, residuals and logits."""

import math

from everserve.model.families.family import Family
from everserve.model.families.latent import latent
from everserve.model.families.reading import dense, model, no_mlp_bias, num_layers, rms_norm
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec


def read(f: Fields) -> ModelSpec:
    no_mlp_bias(f)
    num, hidden = num_layers(f), f.integer("hidden_size")
    attention = latent(f, value_size=hidden // f.integer("num_attention_heads"), is_interleaved=False)
    depth = f.number("scale_depth", 1.4) / math.sqrt(num)
    base = hidden if "dim_model_base" in f.nulls else f.number("dim_model_base", 256)
    layer = LayerSpec(mixer=attention, ffn=dense(f), norm=rms_norm(f), residual_scale=depth)
    f.get("dim_model_base")
    final = rms_norm(f, scale=base / hidden)
    return model(f, [layer] * num, final, embedding_scale=f.number("scale_emb", 12.0), embedding_scale_is_rounded=True)


FAMILIES = (
    Family(
        architecture="MiniCPM3ForCausalLM",
        models="MiniCPM3 4B",
        kinds="latent attention, longrope, scaled embedding, residuals and logits",
        read=read,
        is_tied=True,
    ),
)
