"""Latent attention (MLA), as the files that have it describe it."""

import math

from everserve.model.families.reading import rope
from everserve.model.fields import Fields
from everserve.model.spec import Latent, RopeConfig

_ABOUT_LATENT_HEADS = ("qk_head_dim", "head_dim")  # follow from the others


def latent(f: Fields, *, value_size: int | None = None, is_interleaved: bool = True) -> Latent:
    """`value_size`: of files that leave it out."""
    num_heads = f.integer("num_attention_heads")
    if f.integer("num_key_value_heads", num_heads) != num_heads:
        raise f.error("num_key_value_heads", f"must be num_attention_heads ({num_heads}) here; correct the file")
    plain, rotary = f.integer("qk_nope_head_dim"), f.integer("qk_rope_head_dim")
    if rotary % 2:
        raise f.error("qk_rope_head_dim", "must be even: rotary embedding turns pairs; correct the file")
    f.ignore(*_ABOUT_LATENT_HEADS)
    turn, bias = rope(f, size=rotary), f.flag("attention_bias", False)
    return Latent(
        num_heads=num_heads,
        q_rank=_q_rank(f),
        kv_rank=f.integer("kv_lora_rank"),
        plain_size=plain,
        rotary_size=rotary,
        value_size=f.integer("v_head_dim", value_size),
        scale=(plain + rotary) ** -0.5 * _sharpening(turn),
        rope=turn,
        is_interleaved=is_interleaved,
        down_bias=bias,
        output_bias=bias,
    )


def _q_rank(f: Fields) -> int | None:
    """Null where q is made of x at once."""
    if "q_lora_rank" in f.nulls:
        f.get("q_lora_rank")
        return None
    return f.integer("q_lora_rank")


def _sharpening(turn: RopeConfig) -> float:
    """What scores are multiplied with over long contexts: twice what YaRN means for q and for k, of which cos and sin
    have nothing where both factors of the file are the same."""
    if turn.kind != "yarn" or not turn.mscale_all_dim or turn.factor <= 1:
        return 1.0
    return (0.1 * turn.mscale_all_dim * math.log(turn.factor) + 1.0) ** 2
