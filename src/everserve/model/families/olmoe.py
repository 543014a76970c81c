"""OLMoE: norms of q and k over all heads."""

from everserve.model.families.family import Family
from everserve.model.families.reading import experts, full_attention_only, gqa, model, num_layers, rms_norm
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec, QkNorm, Router


def read(f: Fields) -> ModelSpec:
    full_attention_only(f)
    if f.has("clip_qkv"):
        raise f.error("clip_qkv", "is not supported; use a model whose q, k and v are not clipped")
    norm, bias = rms_norm(f), f.flag("attention_bias", False)
    attention = gqa(f, needs_kv_heads=False, qk_norm=QkNorm.ROW, qkv_bias=bias, output_bias=bias)
    router = Router(top_k=f.integer("num_experts_per_tok"), renormalise=f.flag("norm_topk_prob", False))
    ffn = experts(f, "intermediate_size", router, "num_experts", "num_local_experts")
    return model(f, [LayerSpec(mixer=attention, ffn=ffn, norm=norm)] * num_layers(f), norm)


FAMILIES = (
    Family(
        architecture="OlmoeForCausalLM",
        models="OLMoE",
        kinds="experts: softmax router; norms over all heads",
        read=read,
    ),
)
