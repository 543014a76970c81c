"""ERNIE 4.5: neighbouring pairs are rotated; the MoE corrects what softmax chooses, and has shared experts."""

from everserve.model.families.family import Family
from everserve.model.families.names import Names
from everserve.model.families.reading import dense, experts, full_attention_only, gqa, model, num_layers, rms_norm
from everserve.model.fields import Fields
from everserve.model.spec import Dense, Gqa, LayerSpec, ModelSpec, Router, Shared


def _attention(f: Fields, bias: bool) -> Gqa:
    full_attention_only(f)
    return gqa(
        f, needs_kv_heads=False, is_interleaved=True, qkv_bias=bias, output_bias=bias, default_theta=5e5
    )  # fmt: skip


def read(f: Fields) -> ModelSpec:
    norm, bias = rms_norm(f), f.flag("use_bias", False)
    layer = LayerSpec(mixer=_attention(f, bias), ffn=dense(f, has_bias=bias), norm=norm)
    return model(f, [layer] * num_layers(f), norm)


def read_moe(f: Fields) -> ModelSpec:
    f.expect("moe_gate", "topk")
    f.expect("moe_use_aux_free", True)
    f.expect("moe_capacity", f.get("moe_capacity"))
    f.ignore("num_nextn_predict_layers", "moe_capacity", "moe_group")
    norm, num, bias = rms_norm(f), num_layers(f), f.flag("use_bias", False)
    attention, size = _attention(f, bias), f.integer("moe_intermediate_size")
    num_shared = f.integer("moe_num_shared_experts", 0, minimum=0)
    shared = Shared(ffn=Dense(size=num_shared * size, has_bias=bias)) if num_shared else None
    router = Router(
        top_k=f.integer("moe_k"), has_correction=True, renormalise=True, least_sum=f.number("moe_norm_min", 1e-12)
    )
    ffns = dense(f, has_bias=bias), experts(f, "moe_intermediate_size", router, "moe_num_experts", shared=shared)
    first, step = f.integer("moe_layer_start_index", 1, minimum=0), f.integer("moe_layer_interval", 1)
    end = f.get("moe_layer_end_index", -1)
    last = num - 1 if end == -1 else f.integer("moe_layer_end_index", minimum=0)
    are_sparse = [(i + 1) % step == 0 and first <= i <= last for i in range(num)]
    return model(f, [LayerSpec(mixer=attention, ffn=ffns[is_sparse], norm=norm) for is_sparse in are_sparse], norm)


FAMILIES = (
    Family(
        architecture="Ernie4_5ForCausalLM",
        models="ERNIE 4.5 0.3B",
        kinds="interleaved rotation, biases",
        read=read,
        is_tied=True,
    ),
    Family(
        architecture="Ernie4_5_MoeForCausalLM",
        models="ERNIE 4.5 MoE (text)",
        kinds="experts: softmax router with correction, shared experts, dense first layers; interleaved rotation",
        read=read_moe,
        is_tied=True,
        names=Names(correction="mlp.moe_statics.e_score_correction_bias", correction_shape=(1,)),
        unused=(r"model\.mtp_.*",),
    ),
)
