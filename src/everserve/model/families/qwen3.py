"""Qwen 3, and the text part of Qwen 3 VL: a norm of each head of q and k."""

from everserve.model.families.family import Family
from everserve.model.families.names import Names, Stacked
from everserve.model.families.reading import (
    dense,
    experts,
    full_attention_only,
    gqa,
    head_size,
    model,
    num_layers,
    rms_norm,
    rope,
    sparse_layers,
)
from everserve.model.families.windows import qwen_windows, with_windows
from everserve.model.fields import Fields
from everserve.model.spec import Gqa, LayerSpec, ModelSpec, QkNorm, Router

# Which part of a rotation follows which of three positions. Text has one position, which all three are.
_OF_IMAGES = frozenset({"mrope_section", "mrope_interleaved"})


def _attention(f: Fields, needs_head_dim: bool) -> Gqa:
    bias = f.flag("attention_bias", False)
    size = head_size(f, f.integer("num_attention_heads"), f.integer("hidden_size"), needs_head_dim)
    turn = rope(f, size=size, also=_OF_IMAGES)
    return gqa(f, needs_head_dim=needs_head_dim, qk_norm=QkNorm.HEAD, qkv_bias=bias, output_bias=bias, rope=turn)


def read(f: Fields) -> ModelSpec:
    norm, ffn = rms_norm(f), dense(f)
    # Heads are not hidden_size / num_heads wide; the files always say how wide they are.
    mixers = with_windows(_attention(f, needs_head_dim=True), qwen_windows(f, num_layers(f)))
    return model(f, [LayerSpec(mixer=mixer, ffn=ffn, norm=norm) for mixer in mixers], norm)


def read_moe(f: Fields) -> ModelSpec:
    full_attention_only(f)
    f.expect("use_sliding_window", False, reason="is not built for this architecture; use a model with full attention")
    f.ignore("sliding_window", "max_window_layers")
    norm, attention, are_sparse = rms_norm(f), _attention(f, needs_head_dim=False), sparse_layers(f)
    ffn = dense(f)
    if not any(are_sparse):
        return model(f, [LayerSpec(mixer=attention, ffn=ffn, norm=norm)] * num_layers(f), norm)
    router = Router(top_k=f.integer("num_experts_per_tok"), renormalise=f.flag("norm_topk_prob"))
    ffns = ffn, experts(f, "moe_intermediate_size", router, "num_experts", "num_local_experts")
    return model(f, [LayerSpec(mixer=attention, ffn=ffns[is_sparse], norm=norm) for is_sparse in are_sparse], norm)


def read_vl_moe(f: Fields) -> ModelSpec:
    f.expect("norm_topk_prob", True)  # files leave it out, or say that it is so
    f.assume(norm_topk_prob=True)
    return read_moe(f)


FAMILIES = (
    Family(
        architecture="Qwen3ForCausalLM",
        models="Qwen 3",
        kinds="norms of q and k, windows in some layers",
        read=read,
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        models="Qwen 3 MoE, Coder",
        kinds="experts: softmax router, some layers without",
        read=read_moe,
    ),
    Family(
        architecture="Qwen3VLForConditionalGeneration",
        models="Qwen 3 VL (text)",
        kinds="norms of q and k",
        read=read,
        wrapper="Qwen3VLForConditionalGeneration",
    ),
    Family(
        architecture="Qwen3VLMoeForConditionalGeneration",
        models="Qwen 3 VL MoE (text)",
        kinds="experts: softmax router",
        read=read_vl_moe,
        names=Names(stacked=Stacked(is_transposed=True, may_be_plain=True), is_stacked=True),
        wrapper="Qwen3VLMoeForConditionalGeneration",
    ),
)
