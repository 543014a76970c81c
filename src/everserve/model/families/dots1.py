"""dots.llm1: sigmoid router with groups, shared experts, dense first layers, windows in some layers."""

from everserve.model.families.family import Family
from everserve.model.families.reading import (
    FULL,
    SLIDING,
    dense,
    experts,
    gqa,
    layer_types,
    model,
    num_layers,
    rms_norm,
    window,
)
from everserve.model.families.routers import corrected_router, dense_first
from everserve.model.families.windows import with_windows
from everserve.model.fields import Fields
from everserve.model.spec import Dense, LayerSpec, ModelSpec, QkNorm, Shared


def read(f: Fields) -> ModelSpec:
    norm, num, size = rms_norm(f), num_layers(f), window(f)
    num_full = f.integer("max_window_layers", num, minimum=0)
    kinds = layer_types(f, [FULL if size is None or i < num_full else SLIDING for i in range(num)])
    f.expect("use_sliding_window", False, True)
    bias = f.flag("attention_bias", False)
    attention = gqa(f, needs_kv_heads=False, qk_norm=QkNorm.HEAD, qkv_bias=bias, output_bias=bias)
    mixers = with_windows(attention, [size if kind == SLIDING else None for kind in kinds])
    shared = Shared(ffn=Dense(size=f.integer("moe_intermediate_size") * f.integer("n_shared_experts")))
    ffns = dense(f), experts(f, "moe_intermediate_size", corrected_router(f), "n_routed_experts", shared=shared)
    are_sparse = zip(mixers, dense_first(f), strict=True)
    return model(f, [LayerSpec(mixer=mixer, ffn=ffns[is_sparse], norm=norm) for mixer, is_sparse in are_sparse], norm)


FAMILIES = (
    Family(
        architecture="Dots1ForCausalLM",
        models="dots.llm1",
        kinds="experts: sigmoid router with correction and groups, shared experts, dense first layers",
        read=read,
    ),
)
