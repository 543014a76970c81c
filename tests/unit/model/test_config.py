"""ModelConfig: published configs read right, both styles of file, and one clear line for everything else."""

import json
from pathlib import Path
from typing import Any

import pytest

from everserve.errors import ModelError
from everserve.model.config import ModelConfig
from everserve.model.spec import QkNorm, RopeConfig
from tests.support.models import KINDS, model_directory

# As on the hub, without fields that nobody reads.
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
}
QWEN2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
ABSENT = object()


def read(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ABSENT}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_directory(directory)


def test_mixtral(tmp_path: Path) -> None:
    config = read(tmp_path, MIXTRAL_8X7B)
    assert config.architecture == "MixtralForCausalLM"
    mixer = config.layers[0].mixer
    assert (config.head_size, config.num_kv_heads, config.num_experts, config.experts_per_token) == (128, 8, 8, 2)
    assert config.moe_layers == tuple(range(32)) and config.layers[0].ffn.router.renormalise
    assert config.layers[0].ffn.size == 14336
    assert mixer.rope == RopeConfig(kind="default", theta=1e6)
    assert mixer.qk_norm is QkNorm.NONE and config.dtype == "bfloat16" and config.eos_token_ids == (2,)


def test_qwen3_moe(tmp_path: Path) -> None:
    generation = {"eos_token_id": [151645, 151643]}
    config = read(tmp_path, QWEN3_30B_A3B, generation)
    assert (config.num_experts, config.layers[0].ffn.size, config.head_size) == (128, 768, 128)
    assert config.layers[0].mixer.qk_norm is QkNorm.HEAD and len(config.moe_layers) == 48
    assert config.layers[0].ffn.router.renormalise
    assert config.eos_token_ids == (151645, 151643)

    sparse = read(tmp_path, {**QWEN3_30B_A3B, "decoder_sparse_step": 2, "mlp_only_layers": [1, 4]})
    assert sparse.moe_layers == tuple(range(3, 48, 2))


def test_llama_with_scaled_rope(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA_3_1_8B)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert (config.num_experts, config.moe_layers, config.max_position_embeddings) == (0, (), 131072)
    expected = RopeConfig(kind="llama3", theta=5e5, factor=8.0, original_max_positions=8192)
    assert config.layers[0].mixer.rope == expected

    new_style = {**LLAMA_3_1_8B, "rope_scaling": ABSENT, "rope_theta": ABSENT, "torch_dtype": ABSENT}
    new_style |= {"dtype": "bfloat16", "rope_parameters": {**LLAMA_3_1_8B["rope_scaling"], "rope_theta": 5e5}}
    assert read(tmp_path, new_style) == config


def test_mistral_and_qwen2_without_windows(tmp_path: Path) -> None:
    mistral = read(tmp_path, MISTRAL_7B)
    mixer = mistral.layers[0].mixer
    assert (mistral.head_size, mistral.num_kv_heads, mixer.qkv_bias, mixer.window) == (128, 8, False, None)
    assert read(tmp_path, {**MISTRAL_7B, "sliding_window": 32768}) == mistral, "no sequence is longer"
    qwen = read(tmp_path, QWEN2_5_7B)
    mixer = qwen.layers[0].mixer
    assert (qwen.head_size, qwen.num_kv_heads, mixer.qk_norm) == (128, 4, QkNorm.NONE)
    assert mixer.qkv_bias and not mixer.output_bias, "though the file does not say so"
    longer = read(tmp_path, {**MISTRAL_7B, "sliding_window": 32768, "rope_scaling": YARN})
    assert longer.layers[0].mixer.window == 32768, "what YaRN adds is beyond the window"


def test_windows(tmp_path: Path) -> None:
    mistral = read(tmp_path, {**MISTRAL_7B, "sliding_window": ABSENT})
    assert {layer.mixer.window for layer in mistral.layers} == {4096}, "what the first files mean"
    config = read(tmp_path, {**QWEN2_5_7B, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20})
    assert [layer.mixer.window for layer in config.layers] == [None] * 20 + [4096] * 8


def test_what_files_without_rope_theta_mean(tmp_path: Path) -> None:
    thetas = {"llama": 1e4, "mistral": 1e4, "qwen2": 1e4, "mixtral": 1e6}
    bases = {"llama": LLAMA_3_1_8B, "mistral": MISTRAL_7B, "qwen2": QWEN2_5_7B, "mixtral": MIXTRAL_8X7B}
    for kind, theta in thetas.items():
        assert read(tmp_path, {**bases[kind], "rope_theta": ABSENT}).layers[0].mixer.rope.theta == theta
        assert transformers_theta(tmp_path) == theta


def transformers_theta(directory: Path) -> float:
    from transformers import AutoConfig  # noqa: PLC0415  seconds

    kinds = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}
    values = json.loads((directory / "config.json").read_text())
    values["model_type"] = kinds.get(values["architectures"][0], "mixtral")
    config = AutoConfig.for_model(**values)
    return float(config.rope_parameters["rope_theta"])


def test_yarn_that_a_user_switched_on_extends_the_context(tmp_path: Path) -> None:
    config = read(tmp_path, {**QWEN3_30B_A3B, "rope_scaling": YARN})
    assert config.layers[0].mixer.rope == RopeConfig(kind="yarn", theta=1e6, factor=4.0, original_max_positions=32768)
    assert config.max_position_embeddings == 131072


def test_defaults_that_old_files_rely_on(tmp_path: Path) -> None:
    optional = ("num_key_value_heads", "attention_bias", "tie_word_embeddings", "mlp_bias", "eos_token_id")
    config = read(tmp_path, {**LLAMA_3_1_8B, **dict.fromkeys(optional, ABSENT)})
    assert (config.num_kv_heads, config.layers[0].mixer.qkv_bias, config.tie_word_embeddings) == (32, False, False)
    assert config.eos_token_ids == ()


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_writes(kind: str) -> None:
    config = ModelConfig.from_directory(model_directory(kind))
    assert config.eos_token_ids == (2,) and config.dtype == "float32"
    if kind == "qwen3-moe-mixed":
        assert config.moe_layers == (1,)


# field, bad value, and what the line must say besides
BAD_FIELDS = [
    (MIXTRAL_8X7B, "architectures", ["GemmaForCausalLM"], "MixtralForCausalLM"),
    (MIXTRAL_8X7B, "architectures", ABSENT, "missing"),
    (MIXTRAL_8X7B, "architectures", ["Qwen3NextForCausalLM"], "needs recurrent layers"),
    (MIXTRAL_8X7B, "architectures", ["DeepseekV32ForCausalLM"], "needs an index of keys"),
    (MIXTRAL_8X7B, "architectures", ["LlavaForConditionalGeneration"], "needs images or audio beside text"),
    (MIXTRAL_8X7B, "num_hidden_layers", 10**9, "at most 4096"),
    (MIXTRAL_8X7B, "num_local_experts", 10**6, "at most 65536"),
    (MISTRAL_7B, "attention_bias", True, "not a property"),
    (MISTRAL_7B, "sliding_window", 0, "at least 1"),
    (MISTRAL_7B, "residual_multiplier", 0.2, "remove it if it does not"),
    (MIXTRAL_8X7B, "attention_bias", True, "not a property"),
    (MIXTRAL_8X7B, "num_local_experts", ABSENT, "missing"),
    (MIXTRAL_8X7B, "num_local_experts", 0, "at least 1"),
    (MIXTRAL_8X7B, "num_experts_per_tok", 9, "8 experts"),
    (MIXTRAL_8X7B, "num_key_value_heads", ABSENT, "missing"),
    (MIXTRAL_8X7B, "num_key_value_heads", 5, "divide"),
    (QWEN3_30B_A3B, "use_sliding_window", True, "full attention"),
    (QWEN3_30B_A3B, "layer_types", ["full_attention", "sliding_attention"], "num_hidden_layers (48)"),
    (QWEN3_30B_A3B, "layer_types", ["linear_attention"] * 48, "full_attention"),
    (QWEN3_30B_A3B, "norm_topk_prob", ABSENT, "true or false"),
    (QWEN3_30B_A3B, "num_local_experts", 64, "disagree"),
    (QWEN3_30B_A3B, "mlp_only_layers", [48], "below 48"),
    (QWEN3_30B_A3B, "quantization_config", {"quant_method": "hqq"}, "is not built"),
    (QWEN3_30B_A3B, "head_dim", 63, "even"),
    (LLAMA_3_1_8B, "hidden_size", ABSENT, "missing"),
    (LLAMA_3_1_8B, "hidden_size", -4096, "-4096"),
    (LLAMA_3_1_8B, "vocab_size", 10**12, "at most"),
    (LLAMA_3_1_8B, "hidden_size", True, "integer"),
    (LLAMA_3_1_8B, "num_attention_heads", 31, "head_dim"),
    (LLAMA_3_1_8B, "hidden_act", "gelu", "silu"),
    (LLAMA_3_1_8B, "mlp_bias", True, "bias"),
    (LLAMA_3_1_8B, "rms_norm_eps", 0, "above 0"),
    (LLAMA_3_1_8B, "rms_norm_eps", "1e-5", "number"),
    (LLAMA_3_1_8B, "rms_norm_eps", float("nan"), "NaN"),
    (LLAMA_3_1_8B, "rope_theta", 10**400, "number"),
    (LLAMA_3_1_8B, "torch_dtype", "float8_e4m3fn", "bfloat16"),
    (LLAMA_3_1_8B, "torch_dtype", ABSENT, "missing"),
    (LLAMA_3_1_8B, "rope_theta", 1, "above 1"),
    (LLAMA_3_1_8B, "rope_parameters", {"rope_type": "default"}, "disagree"),
    (LLAMA_3_1_8B, "rope_scaling", {"type": "dynamic", "factor": 2.0}, "linear"),
    (LLAMA_3_1_8B, "rope_scaling", {"rope_type": "linear"}, "factor"),
    (LLAMA_3_1_8B, "rope_scaling", {"type": "linear", "factor": 2.0, "surprise": 1}, "surprise"),
    (LLAMA_3_1_8B, "rope_scaling", {**LLAMA_3_1_8B["rope_scaling"], "high_freq_factor": 1.0}, "low_freq_factor"),
    (LLAMA_3_1_8B, "rope_scaling", [1], "object"),
    (LLAMA_3_1_8B, "partial_rotary_factor", 1.5, "at most 1"),
    (LLAMA_3_1_8B, "eos_token_id", 128256, "below 128256"),
]


@pytest.mark.parametrize(("base", "field", "value", "hint"), BAD_FIELDS)
def test_one_line_names_the_file_the_field_and_the_way_out(
    tmp_path: Path, base: dict[str, Any], field: str, value: Any, hint: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, {**base, field: value})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(tmp_path / "config.json"))
    assert hint in message
    if field != "num_attention_heads":  # seen as a head_dim that does not come out even
        assert field in message


def test_directories_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a directory"):
        ModelConfig.from_directory(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="does not exist"):
        ModelConfig.from_directory(tmp_path)
    for content in ("{", "[]", '"\\', "[" * 200_000, '{"a":' * 200_000):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=r"config\.json.*download it again"):
            ModelConfig.from_directory(tmp_path)
