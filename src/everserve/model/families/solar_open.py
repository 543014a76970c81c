"""Solar Open: sigmoid router with groups and a shared expert in every layer."""

from everserve.model.families.family import Family
from everserve.model.families.reading import experts, full_attention_only, gqa, model, num_layers, rms_norm
from everserve.model.families.routers import corrected_router
from everserve.model.fields import Fields
from everserve.model.spec import Dense, LayerSpec, ModelSpec, Shared


def read(f: Fields) -> ModelSpec:
    full_attention_only(f)
    f.expect("first_k_dense_replace", 0)
    f.expect("use_qk_norm", False)
    f.ignore("intermediate_size")  # of dense layers, of which there are none
    norm, bias = rms_norm(f), f.flag("attention_bias", False)
    attention = gqa(f, needs_head_dim=True, qkv_bias=bias, default_theta=1e6)
    shared = Shared(ffn=Dense(size=f.integer("moe_intermediate_size") * f.integer("n_shared_experts", 1)))
    ffn = experts(f, "moe_intermediate_size", corrected_router(f), "n_routed_experts", shared=shared)
    return model(f, [LayerSpec(mixer=attention, ffn=ffn, norm=norm)] * num_layers(f), norm)


FAMILIES = (
    Family(
        architecture="SolarOpenForCausalLM",
        models="Solar Open",
        kinds="experts: sigmoid router with correction and groups, shared expert",
        read=read,
    ),
)
