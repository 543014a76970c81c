"""MiniMax-M2: sigmoid router with a correction, norms over all heads, part of each head is rotated."""

from everserve.model.families.family import Family
from everserve.model.families.names import Names
from everserve.model.families.reading import experts, full_attention_only, gqa, head_size, model, num_layers, rms_norm
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec, QkNorm, Router, Score

_NAMES = Names(
    router="block_sparse_moe.gate.weight",
    correction="block_sparse_moe.e_score_correction_bias",
    expert_gate="block_sparse_moe.experts.{e}.w1",
    expert_up="block_sparse_moe.experts.{e}.w3",
    expert_down="block_sparse_moe.experts.{e}.w2",
    when_stacked={"router": "mlp.gate.weight", "correction": "mlp.e_score_correction_bias"},
)


def read(f: Fields) -> ModelSpec:
    full_attention_only(f)
    f.expect("scoring_func", "sigmoid")
    f.expect("use_routing_bias", True)
    f.expect("use_qk_norm", True)
    f.expect("qk_norm_type", "per_layer")
    f.expect("shared_intermediate_size", 0)
    f.expect("attn_type_list", [1] * num_layers(f))
    f.ignore("mlp_intermediate_size", "shared_moe_mode", "num_mtp_modules", "mtp_transformer_layers", "use_mtp")
    f.ignore("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta")
    size = head_size(f, f.integer("num_attention_heads"), f.integer("hidden_size"))
    rotated = f.integer("rotary_dim", size, maximum=size)
    norm, attention = rms_norm(f), gqa(f, partial=rotated / size, qk_norm=QkNorm.ROW, default_theta=5e6)
    top_k = f.integer("num_experts_per_tok")
    router = Router(top_k=top_k, score=Score.SIGMOID, has_correction=True, renormalise=True)
    ffn = experts(f, "intermediate_size", router, "num_local_experts", "num_experts")
    return model(f, [LayerSpec(mixer=attention, ffn=ffn, norm=norm)] * num_layers(f), norm)


FAMILIES = (
    Family(
        architecture="MiniMaxM2ForCausalLM",
        models="MiniMax-M2",
        kinds="experts: sigmoid router with correction; norms over all heads, partial rotation",
        read=read,
        names=_NAMES,
    ),
)
