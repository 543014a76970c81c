"""A tiny random checkpoint of every family that is served, written by transformers, with what is odd about it switched
on: windows and chunks shorter than the texts of tests, groups, biases, factors that are not 1.

    directory = family_directory("gpt-oss")
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.models import root

VOCAB_SIZE, MAX_POSITIONS = 192, 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_GROUPS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
_WINDOW = {"sliding_window": 24}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": MAX_POSITIONS,
}

_LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
_MSCALES = {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7}

# name -> (model type of transformers, what differs from _COMMON)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", _WINDOW),
    "ministral": ("ministral", {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "ministral3": (
        "ministral3",
        {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, **_WINDOW}),
    "qwen2": ("qwen2", {**_WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen2-moe": (
        "qwen2_moe",
        {"num_experts": 8, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1], **_MOE},
    ),
    "qwen3": ("qwen3", {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 8, "norm_topk_prob": True, **_MOE}),
    "glm4": ("glm4", {}),
    "glm4-moe": ("glm4_moe", {**_GROUPS, "use_qk_norm": True, "attention_bias": True}),
    "phi3": ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, **_WINDOW}),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": MAX_POSITIONS},
    ),
    "gemma2": (
        "gemma2",
        {**_WINDOW, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_WINDOW,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            },
        },
    ),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 16}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _WINDOW),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "granite": ("granite", {**_MULTIPLIERS, "attention_bias": True}),
    "granite-moe": ("granitemoe", {**_MULTIPLIERS, "num_local_experts": 8, "num_experts_per_tok": 3}),
    "minimax-m2": (
        "minimax_m2",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8, "intermediate_size": 32},
    ),
    "hunyuan-dense": ("hunyuan_v1_dense", {}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": 2}),
    "dots1": ("dots1", {**_GROUPS, **_WINDOW, "max_window_layers": 2}),
    "ernie4.5": ("ernie4_5", {"use_bias": True}),
    "ernie4.5-moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 2,
        },
    ),
    "smollm3": ("smollm3", {}),
    "seed-oss": ("seed_oss", {"attention_out_bias": True}),
    "exaone4": ("exaone4", _WINDOW),
    "cohere2": ("cohere2", {**_WINDOW, "logit_scale": 0.25}),
    "llama4": (
        "llama4_text",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 80,
            "intermediate_size": 48,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 32,
            "floor_scale": 40,
            "attn_scale": 0.5,
        },
    ),
    "solar-open": ("solar_open", {key: value for key, value in _GROUPS.items() if key != "first_k_dense_replace"}),
    "deepseek-v2": (
        "deepseek_v2",
        {
            **{key: value for key, value in _GROUPS.items() if key != "norm_topk_prob"},
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "rope_parameters": _MSCALES,
        },
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {"n_routed_experts": 8, "n_shared_experts": 2, **_MOE, **_LATENT, "q_lora_rank": None},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {**_GROUPS, **_LATENT, "rope_parameters": _MSCALES, "attention_bias": True},
    ),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        {**{key: value for key, value in _GROUPS.items() if key != "first_k_dense_replace"}, **_LATENT},
    ),
    "minicpm3": (
        "minicpm3",
        {**_LATENT, "scale_emb": 3.0, "dim_model_base": 32, "tie_word_embeddings": False},
    ),
    "youtu": ("youtu", {**_LATENT, "rope_interleave": False, "tie_word_embeddings": False}),
    "arcee": ("arcee", {"rope_parameters": _YARN}),
}


_IMAGES = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_PATCHES = {"image_size": 28, "patch_size": 14}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_OF_QWEN = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
_OF_LLAMA = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
# name -> (model type of the whole, and of the text model; what differs from _COMMON in that; the model of images)
TEXT_PARTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        *("gemma3", *FAMILIES["gemma3"]),
        {"model_type": "siglip_vision_model", **_IMAGES, **_PATCHES},
    ),
    "mistral": ("mistral3", *FAMILIES["mistral"], {"model_type": "pixtral", **_IMAGES, **_PATCHES}),
    "ministral3": ("mistral3", *FAMILIES["ministral3"], {"model_type": "pixtral", **_IMAGES, **_PATCHES}),
    "llama4": ("llama4", *FAMILIES["llama4"], {**_IMAGES, **_PATCHES, **_OF_LLAMA}),
    "qwen3-vl": ("qwen3_vl", "qwen3_vl_text", {"rope_parameters": _MROPE}, _OF_QWEN),
    "qwen3-vl-moe": (
        *("qwen3_vl_moe", "qwen3_vl_moe_text"),
        {"rope_parameters": _MROPE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        _OF_QWEN,
    ),
}


def random_larger_model(name: str) -> Any:
    """One that has this family as its text part."""
    import transformers  # noqa: PLC0415
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES  # noqa: PLC0415

    whole, text, changes, images = TEXT_PARTS[name]
    config = CONFIG_MAPPING[whole](text_config={**_COMMON, **changes, "model_type": text}, vision_config=images)
    model = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[whole])(config).eval()
    _randomise(model, name)
    return model


@cache
def family_directory(name: str, dtype: str = "float32") -> Path:
    """A model of this family with its weights in this dtype; all dtypes hold the same weights, rounded."""
    directory = root() / f"family-{name}-{dtype}"
    model = random_family(name).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    return directory


def family_config(name: str) -> Any:
    """As transformers has it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415  seconds

    kind, changes = FAMILIES[name]
    return CONFIG_MAPPING[kind](**{**_COMMON, **changes})


def random_family(name: str) -> Any:
    import transformers  # noqa: PLC0415
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    transformers.utils.logging.disable_progress_bar()
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FAMILIES[name][0]]
    model = getattr(transformers, architecture)(family_config(name)).eval()
    _randomise(model, name)
    return model


def _randomise(model: Any, name: str) -> None:
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_random_weight(parameter.shape, generator))
        for key, value in model.state_dict().items():  # buffers that are weights, and 0 in a model that was not trained
            if key.endswith(("e_score_correction_bias", "moe_statics.e_score_correction_bias")):
                value.copy_(0.3 * torch.randn(value.shape, generator=generator))


def _random_weight(shape: torch.Size, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    return 0.15 * noise if len(shape) > 1 else 0.8 + 0.3 * noise


def read_config(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "config.json").read_text()))
