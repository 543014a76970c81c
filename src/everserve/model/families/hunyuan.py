"""Hunyuan: norms of q and k behind the rotation; the MoE has a shared expert."""

from typing import Any

from everserve.model.families.family import Family
from everserve.model.families.names import Names
from everserve.model.families.reading import (
    dense,
    experts,
    full_attention_only,
    gqa,
    head_size,
    model,
    num_layers,
    rms_norm,
    rope_fields,
)
from everserve.model.fields import Fields
from everserve.model.spec import Dense, Gqa, LayerSpec, ModelSpec, QkNorm, RopeConfig, Router, Shared

_NAMES = Names(q_norm="self_attn.query_layernorm.weight", k_norm="self_attn.key_layernorm.weight")
_MOE = Names(
    q_norm=_NAMES.q_norm,
    k_norm=_NAMES.k_norm,
    router="mlp.gate.wg.weight",
    shared_gate="mlp.shared_mlp.gate_proj",
    shared_up="mlp.shared_mlp.up_proj",
    shared_down="mlp.shared_mlp.down_proj",
)
# What files of these models carry and what their code does not look at, or what is switched off by these values.
_OFF = {
    "use_qk_norm": True,
    "use_cla": False,
    "use_mla": False,
    "use_mixed_mlp_moe": True,
    "norm_type": "rms",
    "mlp_bias": False,
    "moe_drop_tokens": False,
}


def _attention(f: Fields) -> Gqa:
    full_attention_only(f)
    for name, value in _OFF.items():
        f.expect(name, value)
    f.ignore("eod_token_id", "sep_token_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id")
    f.ignore(
        "text_end_id", "image_token_id", "mask_init_id", "org_vocab_size", "cla_share_factor", "attention_head_dim"
    )
    f.ignore("moe_layer_num_skipped", "moe_random_routing_dropped_token", "rope_type_is_dynamic", "pool_type")
    bias = f.flag("attention_bias", False)
    return gqa(
        f, needs_kv_heads=False, qk_norm=QkNorm.HEAD, norms_after_rope=True, qkv_bias=bias, output_bias=bias,
        **_alpha(f),
    )  # fmt: skip


def _alpha(f: Fields) -> dict[str, Any]:
    """Files call it dynamic, but with a fixed alpha nothing about it is: the base is larger."""
    inner = rope_fields(f)
    if inner.get("type", inner.get("rope_type")) != "dynamic" or not inner.has("alpha"):
        return {}
    size = head_size(f, f.integer("num_attention_heads"), f.integer("hidden_size"))
    theta = (inner if inner.has("rope_theta") else f).number("rope_theta", 1e4, above=1.0)
    f.ignore("rope_theta")
    for name in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "rope_type"):
        inner.ignore(name)
    inner.refuse_unread("dynamic rope with alpha")
    return {"rope": RopeConfig(kind="default", theta=theta * inner.number("alpha") ** (size / (size - 2)))}


def read(f: Fields) -> ModelSpec:
    norm = rms_norm(f)
    return model(f, [LayerSpec(mixer=_attention(f), ffn=dense(f), norm=norm)] * num_layers(f), norm)


def read_moe(f: Fields) -> ModelSpec:
    norm, num, size = rms_norm(f), num_layers(f), f.integer("intermediate_size")
    for name, value in (("num_shared_expert", 1), ("moe_intermediate_size", size), ("num_experts_per_tok", None)):
        found = f.get(name, value)
        if value is not None and found not in (value, [value] * num):
            raise f.error(name, f"is not supported; only {value} in every layer is")
    top_k = f.get("moe_topk", f.get("num_experts_per_tok"))
    top_k = top_k[0] if isinstance(top_k, list) and len(set(top_k)) == 1 else top_k
    if type(top_k) is not int or top_k < 1:
        raise f.error("moe_topk", "must be an integer of at least 1, the same in every layer; correct the file")
    shared = Shared(ffn=Dense(size=size))
    ffn = experts(f, "intermediate_size", Router(top_k=top_k, renormalise=True), "num_experts", shared=shared)
    return model(f, [LayerSpec(mixer=_attention(f), ffn=ffn, norm=norm)] * num, norm)


FAMILIES = (
    Family(
        architecture="HunYuanDenseV1ForCausalLM",
        models="Hunyuan 0.5B to 7B",
        kinds="norms of q and k behind the rotation",
        read=read,
        names=_NAMES,
    ),
    Family(
        architecture="HunYuanMoEV1ForCausalLM",
        models="Hunyuan A13B",
        kinds="experts: softmax router, shared expert; norms of q and k behind the rotation",
        read=read_moe,
        names=_MOE,
    ),
)
