"""Under which names the weights of a layer are in the files. These are those of most files; families say what differs.

`{e}` stands for the number of an expert. Names without `.weight` or `.bias` are modules that may have both. Empty: the
files do not have it.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """All experts of a layer in one tensor: [experts, rows, columns]."""

    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    is_transposed: bool = False  # [N, D, 2F] and [N, F, D]
    may_be_plain: bool = False  # where transposed; a square one is plain
    alternates: bool = False  # row 2i is of gate, row 2i + 1 of up; else the first half is gate


@dataclass(frozen=True, kw_only=True)
class Names:
    layer: str = "model.layers.{i}."
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    input_norm: str = "input_layernorm.weight"
    attention_norm: str = ""
    ffn_norm: str = "post_attention_layernorm.weight"
    answer_norm: str = ""
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""  # instead of the three
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    sinks: str = "self_attn.sinks"
    q_down: str = "self_attn.q_a_proj"  # of latent attention, as are the five below
    q_down_norm: str = "self_attn.q_a_layernorm.weight"
    q_up: str = "self_attn.q_b_proj"  # instead of q, behind q_down
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "self_attn.kv_a_layernorm.weight"
    kv_up: str = "self_attn.kv_b_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    gate_up: str = ""  # instead of gate and up
    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.router.bias"
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_shape: tuple[int, ...] = ()  # in front of the number of experts
    expert_gate: str = "mlp.experts.{e}.gate_proj"
    expert_up: str = "mlp.experts.{e}.up_proj"
    expert_down: str = "mlp.experts.{e}.down_proj"
    stacked: Stacked = field(default_factory=Stacked)
    is_stacked: bool = False  # always; else the files tell
    shared_gate: str = "mlp.shared_experts.gate_proj"
    shared_up: str = "mlp.shared_experts.up_proj"
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_weight: str = "mlp.shared_expert_gate.weight"
    when_stacked: dict[str, str] = field(default_factory=dict)  # names that differ where experts are stacked


USUAL = Names()
