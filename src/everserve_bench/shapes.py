"""Model directories with random weights, of any shape, written without ever holding the model in memory twice."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.model.layout import Layout

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


# Others of about that size, with eight KV heads as their large relatives have: for dividing them.
_DIVISIBLE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
_LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SMALL_LLAMA: dict[str, Any] = _DIVISIBLE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 1024, **_LLAMA3_ROPE},
}
SMALL_QWEN3: dict[str, Any] = _DIVISIBLE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
SMALL_MIXTRAL: dict[str, Any] = _DIVISIBLE | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
SMALL = {"moe": SMALL_MOE, "llama": SMALL_LLAMA, "qwen3": SMALL_QWEN3, "mixtral": SMALL_MIXTRAL}


def write_random_model(directory: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A directory of any architecture that we serve, with normal weights and the bundled model's tokenizer."""
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
    """Names and shapes as the hub's checkpoints have them."""
    with tempfile.TemporaryDirectory(prefix="everserve-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        layout = Layout(ModelConfig.from_directory(directory), stacked_experts=False)
    return {source.name: source.shape for source in layout.all_sources()}


def bytes_per_step(config: dict[str, Any], num_streams: int, context: int, itemsize: int) -> int:
    """The fewest bytes that one decode step must read: every weight it uses once, and the KV of every stream.

    With several streams, experts are counted as if chosen evenly and independently.
    """
    sizes = _Sizes.of(config)
    used = sizes.experts * (1 - (1 - sizes.top_k / sizes.experts) ** num_streams) if sizes.experts else 0
    kv = 2 * config["num_key_value_heads"] * config["head_dim"] * context * num_streams
    layers = config["num_hidden_layers"]
    return int((layers * (sizes.attention + used * sizes.expert + kv) + sizes.head) * itemsize)


def flops_per_step(config: dict[str, Any], num_streams: int, context: int) -> int:
    """Multiplications and additions of one decode step: of each stream with every weight that it uses, and with its
    keys and values."""
    sizes = _Sizes.of(config)
    layers: int = config["num_hidden_layers"]
    weights = layers * (sizes.attention + sizes.top_k * sizes.expert) + sizes.head
    scores: int = 2 * layers * config["num_attention_heads"] * config["head_dim"] * context
    return 2 * num_streams * (weights + scores)


class _Sizes(NamedTuple):
    """Weights, counted."""

    attention: int  # of a layer: all that is not an expert's
    expert: int
    experts: int  # how many there are
    top_k: int
    head: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "_Sizes":
        sizes = {name: torch.Size(shape).numel() for name, shape in tensor_shapes(config).items()}
        layer = {name: size for name, size in sizes.items() if name.startswith("model.layers.0.")}
        return cls(
            attention=sum(size for name, size in layer.items() if ".experts." not in name),
            expert=sum(size for name, size in layer.items() if ".experts.0." in name),
            experts=config.get("num_experts") or config.get("num_local_experts") or 0,
            top_k=config.get("num_experts_per_tok", 0),
            head=sizes.get("lm_head.weight", sizes["model.embed_tokens.weight"]),
        )
