"""gpt-oss: windows in every other layer, attention sinks, biases everywhere, clamped swiglu."""

from everserve.model.families.family import Family
from everserve.model.families.names import Names, Stacked
from everserve.model.families.reading import (
    FULL,
    SLIDING,
    experts,
    gqa,
    layer_types,
    model,
    num_layers,
    rms_norm,
    window,
)
from everserve.model.families.windows import with_windows
from everserve.model.fields import Fields
from everserve.model.spec import Activation, ActivationKind, LayerSpec, ModelSpec, Router, Score

_NAMES = Names(
    router="mlp.router.weight",
    stacked=Stacked(is_transposed=True, alternates=True),
    is_stacked=True,
)


def read(f: Fields) -> ModelSpec:
    f.expect("hidden_act", "silu")
    f.ignore("initial_context_length")  # of the rope: rope_scaling says it, too
    norm, num, bias = rms_norm(f), num_layers(f), f.flag("attention_bias", True)
    attention = gqa(f, has_sinks=True, qkv_bias=bias, output_bias=bias, default_theta=150000.0)
    kinds = layer_types(f, [FULL if i % 2 else SLIDING for i in range(num)])
    size = window(f, 128)
    mixers = with_windows(attention, [size if kind == SLIDING else None for kind in kinds])
    activation = Activation(
        kind=ActivationKind.CLAMPED_SWIGLU, alpha=f.number("swiglu_alpha", 1.702), limit=f.number("swiglu_limit", 7.0)
    )
    if f.has("experts_per_token"):
        f.expect("experts_per_token", f.integer("num_experts_per_tok"))
    router = Router(top_k=f.integer("num_experts_per_tok"), score=Score.SOFTMAX_OF_CHOSEN, has_bias=True)
    ffn = experts(
        f, "intermediate_size", router, "num_local_experts", "num_experts", activation=activation, has_bias=True
    )
    return model(f, [LayerSpec(mixer=mixer, ffn=ffn, norm=norm) for mixer in mixers], norm)


FAMILIES = (
    Family(
        architecture="GptOssForCausalLM",
        models="gpt-oss",
        kinds="experts: softmax of the chosen, biases, clamped swiglu; windows in some layers, sinks, yarn",
        read=read,
        names=_NAMES,
    ),
)
