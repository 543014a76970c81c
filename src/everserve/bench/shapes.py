"""Model directories with random weights, of any shape, written without ever holding the model in memory twice."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from everserve.model.bundled import DEMO_MODEL

# The 61 M-parameter shape that other servers were measured with on the same 2-core machine.
SMALL_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}


def write_random_model(directory: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A Qwen3-MoE directory with normal weights and the bundled model's tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    for source in DEMO_MODEL.iterdir():
        if source.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(source, directory)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {
        name: torch.ones(shape, dtype=dtype)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        for name, shape in tensor_shapes(config).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the hub's Qwen3-MoE checkpoints have them."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    inner = config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        shapes |= {
            f"{base}.input_layernorm.weight": (hidden,),
            f"{base}.post_attention_layernorm.weight": (hidden,),
            f"{base}.self_attn.q_proj.weight": (queries, hidden),
            f"{base}.self_attn.k_proj.weight": (keys, hidden),
            f"{base}.self_attn.v_proj.weight": (keys, hidden),
            f"{base}.self_attn.o_proj.weight": (hidden, queries),
            f"{base}.self_attn.q_norm.weight": (head,),
            f"{base}.self_attn.k_norm.weight": (head,),
            f"{base}.mlp.gate.weight": (config["num_experts"], hidden),
        }
        for expert in range(config["num_experts"]):
            shapes |= {
                f"{base}.mlp.experts.{expert}.gate_proj.weight": (inner, hidden),
                f"{base}.mlp.experts.{expert}.up_proj.weight": (inner, hidden),
                f"{base}.mlp.experts.{expert}.down_proj.weight": (hidden, inner),
            }
    return shapes


def bytes_per_step(config: dict[str, Any], num_streams: int, context: int, itemsize: int) -> int:
    """The fewest bytes that one decode step must read: every weight it uses once, and the KV of every stream.

    With several streams, experts are counted as if chosen evenly and independently.
    """
    sizes = {name: torch.Size(shape).numel() for name, shape in tensor_shapes(config).items()}
    layer = {name: size for name, size in sizes.items() if name.startswith("model.layers.0.")}
    attention = sum(size for name, size in layer.items() if ".experts." not in name)
    expert = sum(size for name, size in layer.items() if ".experts.0." in name)
    experts, top_k = config["num_experts"], config["num_experts_per_tok"]
    used = experts * (1 - (1 - top_k / experts) ** num_streams)
    kv = 2 * config["num_key_value_heads"] * config["head_dim"] * context * num_streams
    layers = config["num_hidden_layers"]
    return int((layers * (attention + used * expert + kv) + sizes["lm_head.weight"]) * itemsize)
