"""Models as large as a GPU is for, with random weights: a config.json and a tokenizer, nothing else on disk."""

import json
import shutil
from pathlib import Path
from typing import Any

from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.model.spec import Dense, Experts, Gqa, Mixer

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
    "glm-air": {  # GLM-4.5-Air has 46 layers
        **_COMMON,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 16,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    "gpt-oss": {  # gpt-oss-20b, in bfloat16
        **_COMMON,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    "qwen2.5": {  # Qwen2.5-7B
        **_COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
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
    hidden, num = model.hidden_size, float(model.vocab_size * model.hidden_size)
    for layer in model.layers:
        weights, kv = _of_attention(layer.mixer, hidden)
        num += weights + kv * num_streams * min(context, layer.mixer.window or layer.mixer.chunk or context)
        num += _of_ffn(layer.ffn, hidden, num_streams)
    return int(2 * num)


def _of_attention(mixer: Mixer, hidden: int) -> tuple[int, int]:
    """Weights, and what is kept of a token."""
    if isinstance(mixer, Gqa):
        num_values = (2 * mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_size
        return hidden * num_values, 2 * mixer.num_kv_heads * mixer.head_size
    queries = mixer.num_heads * mixer.query_size
    q = hidden * queries if mixer.q_rank is None else mixer.q_rank * (hidden + queries)
    heads = mixer.num_heads * (mixer.kv_rank * (mixer.plain_size + mixer.value_size) + mixer.value_size * hidden)
    return q + hidden * mixer.row_size + heads, mixer.row_size


def _of_ffn(ffn: Dense | Experts, hidden: int, num_streams: int) -> float:
    if isinstance(ffn, Dense):
        return 3 * hidden * ffn.size
    used = ffn.number * (1 - (1 - ffn.router.top_k / ffn.number) ** num_streams)
    shared = 3 * hidden * ffn.shared.ffn.size if ffn.shared is not None else 0
    return used * 3 * hidden * ffn.size + ffn.number * hidden + shared
