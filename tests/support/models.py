"""Tiny random models, as Hugging Face directories that transformers wrote.

    directory = model_directory("mixtral", "bfloat16")

Each is made once per session, in a temporary directory that goes away with the process. Weights are large enough that
logits differ by whole units, so that a wrong weight, mask or position cannot hide in a tolerance.
"""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB_SIZE = 160
MAX_POSITIONS = 256

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN3_MOE = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# kind -> (architecture, what differs from _COMMON)
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3Moe", {**_QWEN3_MOE, "norm_topk_prob": True}),
    # layers 1 and 3 would have experts; 3 is told not to
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {
            **_QWEN3_MOE,
            "norm_topk_prob": False,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-yarn": (
        "Qwen3",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": MAX_POSITIONS // 4,
            },
        },
    ),
    "llama3": (
        "Llama",
        {"rope_parameters": {**_LLAMA3_ROPE, "rope_theta": 1e4, "original_max_position_embeddings": 32}},
    ),
    "llama-bias": (
        "Llama",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),  # biases of q, k and v, and none of the output
}
KINDS = tuple(_KINDS)
MOE_KINDS = ("mixtral", "qwen3-moe", "qwen3-moe-mixed")


@cache
def root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="everserve-models-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def model_directory(
    kind: str, dtype: str = "float32", *, stacked_experts: bool = False, shard_size: str = "1GB"
) -> Path:
    """A model of this kind with its weights in this dtype; all dtypes hold the same weights, rounded."""
    directory = root() / f"{kind}-{dtype}-{'stacked' if stacked_experts else 'hub'}-{shard_size}"
    model = _random_model(kind).to(getattr(torch, dtype))
    model.save_pretrained(directory, save_original_format=not stacked_experts, max_shard_size=shard_size)
    return directory


def transformers_model(directory: Path, dtype: str = "float32") -> Any:
    """The same directory as transformers computes it."""
    import transformers  # noqa: PLC0415  seconds, which tests that only need a directory do not pay twice

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    return model.eval()


def random_tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def _random_model(kind: str) -> Any:
    import transformers  # noqa: PLC0415

    transformers.utils.logging.disable_progress_bar()
    architecture, changes = _KINDS[kind]
    config = getattr(transformers, f"{architecture}Config")(**{**_COMMON, **changes})
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_random_weight(parameter.shape, generator))
    return model


def _random_weight(shape: torch.Size, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    return 0.15 * noise if len(shape) > 1 else 1 + 0.2 * noise
