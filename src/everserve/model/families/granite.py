"""Granite 3 and its MoE: factors of the embedding, attention, what is added, and logits."""

from dataclasses import replace

from everserve.model.families.family import Family
from everserve.model.families.names import Names, Stacked
from everserve.model.families.reading import (
    dense,
    experts,
    full_attention_only,
    gqa,
    model,
    no_mlp_bias,
    num_layers,
    rms_norm,
)
from everserve.model.fields import Fields
from everserve.model.spec import Dense, Experts, LayerSpec, ModelSpec, Router, Score

_MOE = Names(
    router="block_sparse_moe.router.layer.weight",
    stacked=Stacked(gate_up="block_sparse_moe.input_linear.weight", down="block_sparse_moe.output_linear.weight"),
    is_stacked=True,
)


def _model(f: Fields, ffn: Dense | Experts) -> ModelSpec:
    full_attention_only(f)
    norm, bias = rms_norm(f), f.flag("attention_bias", False)
    scale = f.number("attention_multiplier", 1.0)
    attention = gqa(f, needs_kv_heads=False, scale=scale, qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(mixer=attention, ffn=ffn, norm=norm, residual_scale=f.number("residual_multiplier", 1.0))
    final_norm = replace(norm, scale=1 / f.number("logits_scaling", 1.0))
    embedding_scale = f.number("embedding_multiplier", 1.0)
    return model(f, [layer] * num_layers(f), final_norm, embedding_scale=embedding_scale)


def read(f: Fields) -> ModelSpec:
    no_mlp_bias(f)
    return _model(f, dense(f))


def read_moe(f: Fields) -> ModelSpec:
    router = Router(top_k=f.integer("num_experts_per_tok"), score=Score.SOFTMAX_OF_CHOSEN)
    return _model(f, experts(f, "intermediate_size", router, "num_local_experts"))


FAMILIES = (
    Family(
        architecture="GraniteForCausalLM",
        models="Granite 3",
        kinds="scaled embedding, attention, residuals and logits",
        read=read,
    ),
    Family(
        architecture="GraniteMoeForCausalLM",
        models="Granite 3 MoE",
        kinds="experts: softmax of the chosen; scales as Granite",
        read=read_moe,
        names=_MOE,
    ),
)
