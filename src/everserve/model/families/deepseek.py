"""DeepSeek V2 and V3, and what is built like them: latent attention, experts in groups, shared experts."""

from everserve.model.families.family import Family
from everserve.model.families.latent import latent
from everserve.model.families.reading import dense, experts, model, no_mlp_bias, rms_norm
from everserve.model.families.routers import corrected_router, dense_first
from everserve.model.fields import Fields
from everserve.model.spec import Dense, LayerSpec, ModelSpec, Router, Shared

_GROUP_LIMITED = "group_limited_greedy"


def _model(f: Fields, router: Router, *, is_interleaved: bool = True) -> ModelSpec:
    f.ignore("num_nextn_predict_layers", "num_mtp_layers")  # their tensors are left out
    norm, attention = rms_norm(f), latent(f, is_interleaved=is_interleaved)
    shared = Shared(ffn=Dense(size=f.integer("moe_intermediate_size") * f.integer("n_shared_experts")))
    ffns = dense(f), experts(f, "moe_intermediate_size", router, "n_routed_experts", shared=shared)
    layers = [LayerSpec(mixer=attention, ffn=ffns[is_sparse], norm=norm) for is_sparse in dense_first(f)]
    return model(f, layers, norm)


def read_v2(f: Fields) -> ModelSpec:
    no_mlp_bias(f)
    f.expect("scoring_func", "softmax")
    f.expect("norm_topk_prob", False)
    f.expect("topk_method", "greedy", _GROUP_LIMITED)
    f.ignore("n_group", "topk_group")  # without groups they may be anything
    has_groups = f.get("topk_method") == _GROUP_LIMITED
    router = Router(
        top_k=f.integer("num_experts_per_tok"),
        num_groups=f.integer("n_group") if has_groups else 1,
        groups_kept=f.integer("topk_group") if has_groups else 1,
        counted=1,
        scale=f.number("routed_scaling_factor", 1.0),
    )
    return _model(f, router)


def read_v3(f: Fields) -> ModelSpec:
    f.assume(norm_topk_prob=True, first_k_dense_replace=3, n_shared_experts=1, routed_scaling_factor=2.5)
    return _model(f, corrected_router(f), is_interleaved=f.flag("rope_interleave", True))


FAMILIES = (
    Family(
        architecture="DeepseekV2ForCausalLM",
        models="DeepSeek V2, V2.5, V2-Lite, Coder V2",
        kinds="latent attention; experts: softmax router with groups, shared experts, dense first layers; yarn",
        read=read_v2,
    ),
    Family(
        architecture="DeepseekV3ForCausalLM",
        models="DeepSeek V3, V3.1, R1; Kimi K2; Moonlight",
        kinds="latent attention; experts: sigmoid router with correction and groups, shared, dense first layers; yarn",
        read=read_v3,
        next_layers=True,
    ),
)
