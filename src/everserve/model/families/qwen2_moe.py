"""Qwen 1.5 and 2 with experts: a shared expert with a gate of its own."""

from everserve.model.families.family import Family
from everserve.model.families.names import Names
from everserve.model.families.reading import dense, experts, full_attention_only, gqa, model, rms_norm, sparse_layers
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec, Router, Shared

_NAMES = Names(
    shared_gate="mlp.shared_expert.gate_proj",
    shared_up="mlp.shared_expert.up_proj",
    shared_down="mlp.shared_expert.down_proj",
)


def read(f: Fields) -> ModelSpec:
    f.expect("use_sliding_window", False, reason="is not built for this architecture; use a model with full attention")
    f.ignore("sliding_window", "max_window_layers")
    full_attention_only(f)
    norm, attention = rms_norm(f), gqa(f, qkv_bias=f.flag("qkv_bias", True))
    router = Router(top_k=f.integer("num_experts_per_tok"), renormalise=f.flag("norm_topk_prob", False))
    shared = Shared(ffn=dense(f, "shared_expert_intermediate_size"), is_gated=True)
    ffns = dense(f), experts(f, "moe_intermediate_size", router, "num_experts", "num_local_experts", shared=shared)
    layers = [LayerSpec(mixer=attention, ffn=ffns[is_sparse], norm=norm) for is_sparse in sparse_layers(f)]
    return model(f, layers, norm)


FAMILIES = (
    Family(
        architecture="Qwen2MoeForCausalLM",
        models="Qwen 1.5 and 2 MoE",
        kinds="experts: softmax router, gated shared expert",
        read=read,
        names=_NAMES,
    ),
)
