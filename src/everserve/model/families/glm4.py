"""GLM-4: half of each head is rotated, in neighbouring pairs; norms before and behind attention and FFN."""

from everserve.model.families.family import Family
from everserve.model.families.names import Names
from everserve.model.families.reading import dense, full_attention_only, gqa, model, num_layers, rms_norm
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec

_NAMES = Names(
    attention_norm="post_self_attn_layernorm.weight",
    answer_norm="post_mlp_layernorm.weight",
    gate_up="mlp.gate_up_proj",
)


def read(f: Fields) -> ModelSpec:
    full_attention_only(f)
    norm = rms_norm(f)
    attention = gqa(f, partial=0.5, is_interleaved=True, qkv_bias=f.flag("attention_bias", True))
    layer = LayerSpec(mixer=attention, ffn=dense(f), norm=norm, has_attention_norm=True, has_answer_norm=True)
    return model(f, [layer] * num_layers(f), norm)


FAMILIES = (
    Family(
        architecture="Glm4ForCausalLM",
        models="GLM-4-0414, GLM-Z1",
        kinds="partial interleaved rotation, four norms, fused tensors",
        read=read,
        names=_NAMES,
    ),
)
