"""Llama 4 (text): chunks, layers without rope, one expert whose row is weighted, a shared expert."""

from dataclasses import replace

from everserve.model.families.family import Family
from everserve.model.families.names import Names, Stacked
from everserve.model.families.reading import (
    CHUNKED,
    FULL,
    dense,
    experts,
    gqa,
    layer_types,
    layers_with_rope,
    model,
    num_layers,
    rms_norm,
    without_rope,
)
from everserve.model.fields import Fields
from everserve.model.spec import Dense, Gqa, LayerSpec, ModelSpec, QkNorm, Router, Score, Shared, Temperature

_NAMES = Names(
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    router="feed_forward.router.weight",
    stacked=Stacked(
        gate_up="feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj", is_transposed=True
    ),
    is_stacked=True,
    shared_gate="feed_forward.shared_expert.gate_proj",
    shared_up="feed_forward.shared_expert.up_proj",
    shared_down="feed_forward.shared_expert.down_proj",
)


def read(f: Fields) -> ModelSpec:
    norm, num = rms_norm(f), num_layers(f)
    mixers = _mixers(f, num)
    if f.integer("num_experts_per_tok") != 1:
        raise f.error("num_experts_per_tok", "is not supported; only 1 is, where rows are weighted before the expert")
    router = Router(top_k=1, score=Score.SIGMOID, weighs_input=True)
    f.ignore("for_llm_compressor")
    shared = Shared(ffn=Dense(size=f.integer("intermediate_size")))
    ffns = (
        dense(f, "intermediate_size_mlp"),
        experts(f, "intermediate_size", router, "num_local_experts", shared=shared),
    )
    step = f.integer("interleave_moe_layer_step", 1)
    sparse = f.get("moe_layers", [*range(step - 1, num, step)])
    if not isinstance(sparse, list) or not all(type(i) is int and 0 <= i < num for i in sparse):
        raise f.error("moe_layers", f"must be a list of layers below {num}; correct the file")
    layers = [LayerSpec(mixer=mixer, ffn=ffns[i in sparse], norm=norm) for i, mixer in enumerate(mixers)]
    return model(f, layers, norm)


def _mixers(f: Fields, num: int) -> list[Gqa]:
    bias = f.flag("attention_bias", False)
    # In front of the rotation here, behind it in the papers: it changes no length, so that is the same.
    qk_norm = QkNorm.UNIT if f.flag("use_qk_norm", True) else QkNorm.NONE
    rotated = gqa(f, is_interleaved=True, qk_norm=qk_norm, qkv_bias=bias, output_bias=bias, default_theta=5e5)
    tuned = None
    if f.flag("attn_temperature_tuning", True) or f.get("attn_temperature_tuning") == 4:
        tuned = Temperature(every=f.integer("floor_scale", 8192), beta=f.number("attn_scale", 0.1), ahead=1)
    f.ignore("floor_scale", "attn_scale")
    plain = replace(without_rope(rotated), qk_norm=QkNorm.NONE, temperature=tuned)
    has_rope = layers_with_rope(f, num)
    kinds = layer_types(f, [CHUNKED if rope else FULL for rope in has_rope], FULL, CHUNKED)
    chunk = f.integer("attention_chunk_size", 8192)
    return [
        replace(rotated if rope else plain, chunk=chunk if kind == CHUNKED else None)
        for rope, kind in zip(has_rope, kinds, strict=True)
    ]


FAMILIES = (
    Family(
        architecture="Llama4ForCausalLM",
        models="Llama 4 Scout and Maverick (text)",
        kinds="experts: sigmoid router, weight on the input, shared expert; chunks, layers without rope",
        read=read,
        names=_NAMES,
        wrapper="Llama4ForConditionalGeneration",
    ),
)
