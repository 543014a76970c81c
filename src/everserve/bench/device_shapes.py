"""Models as large as a GPU is for, with random weights: a config.json and a tokenizer, nothing else on disk."""

import json
import shutil
from pathlib import Path
from typing import Any

from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {  # Mixtral-8x7B has 32 layers
        **_COMMON,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "llama": {  # Llama-3.1-8B: no experts
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "llama-70b": {  # Llama-3.1-70B has 80 layers
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 16,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    },
    "qwen3-dense": {  # Qwen3-8B
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {  # Qwen3-30B-A3B
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
    },
}


def write_shape(directory: Path, name: str, num_layers: int | None = None) -> Path:
    """A directory for `--load-format dummy`."""
    config = SHAPES[name] | ({"num_hidden_layers": num_layers} if num_layers else {})
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for source in DEMO_MODEL.iterdir():
        if source.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(source, directory)
    return directory


def floor_bytes(model: ModelConfig, num_streams: int, context: int) -> int:
    """The fewest bytes that one decode step must read: every weight that it uses once, and all KV.

    With several streams, experts are counted as if chosen evenly and independently.
    """
    hidden, head = model.hidden_size, model.head_size
    projections = hidden * (model.num_heads + 2 * model.num_kv_heads) * head + model.num_heads * head * hidden
    kv = 2 * model.num_kv_heads * head * context * num_streams
    num_moe = len(model.moe_layers)
    ffns: float = (model.num_layers - num_moe) * 3 * hidden * model.intermediate_size
    if num_moe:
        used = model.num_experts * (1 - (1 - model.experts_per_token / model.num_experts) ** num_streams)
        ffns += num_moe * (used * 3 * hidden * model.expert_intermediate_size + model.num_experts * hidden)
    return int(2 * (model.num_layers * (projections + kv) + ffns + model.vocab_size * hidden))
