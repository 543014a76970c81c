"""Youtu-LLM: latent attention in a dense model."""

from everserve.model.families.family import Family
from everserve.model.families.latent import latent
from everserve.model.families.reading import dense, model, no_mlp_bias, num_layers, rms_norm
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec


def read(f: Fields) -> ModelSpec:
    no_mlp_bias(f)
    f.ignore("embedding_initializer_range")
    attention = latent(f, is_interleaved=f.flag("rope_interleave", True))
    layer = LayerSpec(mixer=attention, ffn=dense(f), norm=rms_norm(f))
    return model(f, [layer] * num_layers(f), layer.norm)


FAMILIES = (
    Family(
        architecture="YoutuForCausalLM",
        models="Youtu-LLM 2B",
        kinds="latent attention",
        read=read,
        is_tied=True,
    ),
)
