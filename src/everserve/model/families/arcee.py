"""Arcee AFM: an FFN without a gate, whose activation is the square of relu."""

from everserve.model.families.family import Family
from everserve.model.families.names import Names
from everserve.model.families.reading import full_attention_only, gqa, model, no_mlp_bias, num_layers, rms_norm
from everserve.model.fields import Fields
from everserve.model.spec import Activation, ActivationKind, Dense, LayerSpec, ModelSpec


def read(f: Fields) -> ModelSpec:
    full_attention_only(f)
    no_mlp_bias(f)
    f.expect("hidden_act", "relu2")
    norm, bias = rms_norm(f), f.flag("attention_bias", False)
    attention = gqa(f, needs_kv_heads=False, qkv_bias=bias, output_bias=bias)
    relu = Activation(kind=ActivationKind.RELU)
    ffn = Dense(size=f.integer("intermediate_size"), activation=relu, has_gate=False)
    return model(f, [LayerSpec(mixer=attention, ffn=ffn, norm=norm)] * num_layers(f), norm)


FAMILIES = (
    Family(
        architecture="ArceeForCausalLM",
        models="AFM 4.5B",
        kinds="relu squared without a gate",
        read=read,
        names=Names(gate=""),
    ),
)
