"""Mistral and Mixtral: where the file has a window, every layer has it."""

from everserve.model.families.family import Family
from everserve.model.families.names import Names
from everserve.model.families.reading import (
    dense,
    experts,
    full_attention_only,
    gqa,
    model,
    num_layers,
    rms_norm,
    window,
)
from everserve.model.fields import Fields
from everserve.model.spec import Dense, Experts, LayerSpec, ModelSpec, Router

_MIXTRAL = Names(
    router="block_sparse_moe.gate.weight",
    expert_gate="block_sparse_moe.experts.{e}.w1",
    expert_up="block_sparse_moe.experts.{e}.w3",
    expert_down="block_sparse_moe.experts.{e}.w2",
    when_stacked={"router": "mlp.gate.weight"},
)


def _model(f: Fields, ffn: Dense | Experts, unsaid_window: int | None, theta: float) -> ModelSpec:
    full_attention_only(f)
    f.expect("attention_bias", False, reason="is not a property of this architecture; remove it or correct the file")
    norm, attention = rms_norm(f), gqa(f, window=window(f, unsaid_window), default_theta=theta)
    return model(f, [LayerSpec(mixer=attention, ffn=ffn, norm=norm)] * num_layers(f), norm)


def read_mistral(f: Fields) -> ModelSpec:
    return _model(f, dense(f), 4096, 1e4)  # the first files do not say that they have a window, and mean this one


def read_mixtral(f: Fields) -> ModelSpec:
    router = Router(top_k=f.integer("num_experts_per_tok"), renormalise=True)
    return _model(f, experts(f, "intermediate_size", router, "num_local_experts", "num_experts"), None, 1e6)


FAMILIES = (
    Family(
        architecture="MistralForCausalLM",
        models="Mistral 7B, Nemo, Small",
        kinds="GQA, rope, sliding windows",
        read=read_mistral,
        wrapper="Mistral3ForConditionalGeneration",
        text_type="mistral",
    ),
    Family(
        architecture="MixtralForCausalLM",
        models="Mixtral",
        kinds="experts: softmax router",
        read=read_mixtral,
        names=_MIXTRAL,
    ),
)
