"""EXAONE 4: norms behind attention and FFN only; layers that see everything have no rotation."""

from dataclasses import replace

from everserve.model.families.family import Family
from everserve.model.families.names import Names
from everserve.model.families.reading import (
    SLIDING,
    dense,
    gqa,
    layer_types,
    model,
    num_layers,
    pattern,
    rms_norm,
    window,
    without_rope,
)
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec, QkNorm


def read(f: Fields) -> ModelSpec:
    norm, size = rms_norm(f), window(f, 4096)
    every = f.get("sliding_window_pattern", 4)
    every = len(every) if isinstance(every, str) else every  # "LLLG": the last one of so many
    if size is None:
        every = 0
    elif type(every) is not int or every < 1:
        raise f.error("sliding_window_pattern", "must be an integer of at least 1; correct the file")
    kinds = layer_types(f, pattern(num_layers(f), every))
    rotated = gqa(f, qk_norm=QkNorm.HEAD)
    whole = rotated if size is None else without_rope(rotated)
    layer = LayerSpec(
        mixer=whole, ffn=dense(f), norm=norm,
        has_input_norm=False, has_attention_norm=True, has_ffn_norm=False, has_answer_norm=True,
    )  # fmt: skip
    windowed = replace(layer, mixer=replace(rotated, window=size))
    return model(f, [windowed if kind == SLIDING else layer for kind in kinds], norm)


FAMILIES = (
    Family(
        architecture="Exaone4ForCausalLM",
        models="EXAONE 4",
        kinds="windows in most layers, the others without rope; norms behind only, norms of q and k",
        read=read,
        names=Names(attention_norm="post_attention_layernorm.weight", answer_norm="post_feedforward_layernorm.weight"),
    ),
)
