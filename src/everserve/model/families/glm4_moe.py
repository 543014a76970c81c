"""GLM-4.5, 4.6 and 4.7: sigmoid router, a shared expert, half of each head is rotated."""

from everserve.model.families.family import Family
from everserve.model.families.reading import dense, experts, full_attention_only, gqa, model, rms_norm
from everserve.model.families.routers import corrected_router, dense_first
from everserve.model.fields import Fields
from everserve.model.spec import Dense, LayerSpec, ModelSpec, QkNorm, Shared


def read(f: Fields) -> ModelSpec:
    full_attention_only(f)
    f.ignore("num_nextn_predict_layers", "num_mtp_layers")  # their tensors are left out
    norm, qk_norm = rms_norm(f), QkNorm.HEAD if f.flag("use_qk_norm", False) else QkNorm.NONE
    attention = gqa(f, partial=0.5, qk_norm=qk_norm, qkv_bias=f.flag("attention_bias", False))
    size = f.integer("moe_intermediate_size") * f.integer("n_shared_experts", 1)
    shared = Shared(ffn=Dense(size=size))
    sparse = experts(f, "moe_intermediate_size", corrected_router(f), "n_routed_experts", shared=shared)
    ffns = dense(f), sparse
    layers = [LayerSpec(mixer=attention, ffn=ffns[is_sparse], norm=norm) for is_sparse in dense_first(f)]
    return model(f, layers, norm)


FAMILIES = (
    Family(
        architecture="Glm4MoeForCausalLM",
        models="GLM-4.5, 4.6, 4.7, and Air",
        kinds="experts: sigmoid router with correction and groups, shared expert, dense first layers; partial rotation",
        read=read,
        next_layers=True,
    ),
)
