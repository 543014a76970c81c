"""GLM-4.7-Flash: the experts of GLM-4.5 behind latent attention."""

from everserve.model.families.family import Family
from everserve.model.families.latent import latent
from everserve.model.families.reading import dense, experts, model, num_layers, rms_norm, rope_fields
from everserve.model.families.routers import corrected_router
from everserve.model.fields import Fields
from everserve.model.spec import Dense, LayerSpec, ModelSpec, Shared


def read(f: Fields) -> ModelSpec:
    f.ignore("num_nextn_predict_layers", "num_mtp_layers")  # their tensors are left out
    f.expect("partial_rotary_factor", 1.0, 1)
    rope_fields(f).expect("partial_rotary_factor", 1.0, 1)
    norm, attention = rms_norm(f), latent(f, is_interleaved=f.flag("rope_interleave", True))
    f.assume(norm_topk_prob=True, n_shared_experts=1, routed_scaling_factor=1.8)
    shared = Shared(ffn=Dense(size=f.integer("moe_intermediate_size") * f.integer("n_shared_experts")))
    ffns = dense(f), experts(f, "moe_intermediate_size", corrected_router(f), "n_routed_experts", shared=shared)
    layers = [LayerSpec(mixer=attention, ffn=ffns[is_sparse], norm=norm) for is_sparse in _are_sparse(f)]
    return model(f, layers, norm)


def _are_sparse(f: Fields) -> list[bool]:
    """All but the first layer, unless the file names them."""
    num = num_layers(f)
    kinds = f.choices("mlp_layer_types", num, ("dense", "sparse")) if f.has("mlp_layer_types") else ()
    found = [kind == "sparse" for kind in kinds] or [i > 0 for i in range(num)]
    f.expect("first_k_dense_replace", found.index(True) if any(found) else num)
    return found


FAMILIES = (
    Family(
        architecture="Glm4MoeLiteForCausalLM",
        models="GLM-4.7-Flash",
        kinds="latent attention; experts: sigmoid router with correction and groups, shared expert",
        read=read,
        next_layers=True,
    ),
)
