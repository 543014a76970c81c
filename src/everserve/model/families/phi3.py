"""Phi-3 and 4: fused tensors, a part of each head is rotated, longrope."""

from everserve.model.families.family import Family
from everserve.model.families.names import Names
from everserve.model.families.reading import dense, full_attention_only, gqa, model, num_layers, rms_norm, window
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec


def read(f: Fields) -> ModelSpec:
    full_attention_only(f)
    f.expect("attention_bias", False)
    f.ignore("original_max_position_embeddings")  # of the rope, where that is scaled
    norm, attention = rms_norm(f), gqa(f, needs_kv_heads=False, window=window(f))
    return model(f, [LayerSpec(mixer=attention, ffn=dense(f), norm=norm)] * num_layers(f), norm)


FAMILIES = (
    Family(
        architecture="Phi3ForCausalLM",
        models="Phi-3, 3.5 and 4 (mini, medium, 14B)",
        kinds="fused tensors, partial rotation, longrope, sliding windows",
        read=read,
        names=Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
    ),
)
