"""Weights in fewer bits: what is loaded is what the formats say, and a model of them computes what its decoded twin
does, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from everserve.backends.cpu import ops as native
from everserve.backends.cpu.reference import ReferenceOps
from everserve.errors import ModelError
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.headers import Headers
from everserve.model.layout import check_headers
from everserve.model.ops import Ops
from tests.support.batches import PagedSequences
from tests.support.families import VOCAB_SIZE, family_directory, read_config
from tests.support.quantised import (
    AWQ,
    FP8,
    GPTQ,
    GROUP,
    Integers,
    Tensors,
    as_awq,
    as_compressed,
    as_gptq,
    as_mxfp4,
    compressed,
    pack_quantized,
    quantise,
    write,
    zeros_of,
)

TOKENS = [(7 * i) % (VOCAB_SIZE - 3) + 3 for i in range(40)]


def logits(directory: Path, ops: Ops | None = None) -> Tensor:
    check_headers(ModelConfig.from_directory(directory), Headers.read(directory))
    with torch.no_grad():
        return PagedSequences(directory, ops or ReferenceOps()).step({0: TOKENS})[0]


def tensors_of(family: str) -> Tensors:
    checkpoint = Checkpoint.open(family_directory(family, "bfloat16"))
    return {name: checkpoint.read(name) for name in checkpoint.names()}


# -- one scale for a tensor, a row or a block ----------------------------------------------------

BLOCK = (32, 16)


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3"])
@pytest.mark.parametrize(
    ("said", "kind", "suffix", "to"),
    [
        ({**FP8, "weight_block_size": list(BLOCK)}, "block", "_scale_inv", torch.float8_e4m3fn),
        (FP8, "tensor", "_scale", torch.float8_e4m3fn),
        (compressed("channel", "float"), "channel", "_scale", torch.float8_e4m3fn),
        (compressed("tensor", "float"), "tensor", "_scale", torch.float8_e4m3fn),
        (compressed("block", "float", block_structure=list(BLOCK)), "block", "_scale", torch.float8_e4m3fn),
        (compressed("channel", "int"), "channel", "_scale", torch.int8),
    ],
)
def test_eight_bits(family: str, said: dict, kind: str, suffix: str, to: torch.dtype, tmp_path: Path) -> None:
    coded, decoded = Tensors(), Tensors()
    for name, tensor in tensors_of(family).items():
        coded[name] = decoded[name] = tensor
        if name.endswith("_proj.weight"):
            block = {"block": BLOCK, "channel": (1, tensor.shape[1]), "tensor": tuple(tensor.shape)}[kind]
            coded[name], coded[f"{name}{suffix}"], decoded[name] = quantise(tensor, block, to)
            coded[f"{name.removesuffix('.weight')}.input_scale"] = torch.ones(1)
    config = read_config(family_directory(family, "bfloat16"))
    twin = write(tmp_path / "twin", config, decoded)
    found = write(tmp_path / "coded", {**config, "quantization_config": said}, coded)
    assert torch.equal(logits(found), logits(twin))


@pytest.mark.parametrize("block", [BLOCK, (1, 96), (200, 96)])
def test_a_part_of_a_scaled_weight(block: tuple[int, int], tmp_path: Path) -> None:
    """Slices that begin and end within blocks, and more rows than are decoded at once."""
    weight = torch.randn(200, 96, generator=torch.Generator().manual_seed(1))
    values, scales, decoded = quantise(weight, block, torch.float8_e4m3fn)
    config = read_config(family_directory("qwen3", "bfloat16"))
    said = {**FP8, "weight_block_size": list(block)}
    found = write(tmp_path / "m", {**config, "quantization_config": said}, {"w": values, "w_scale_inv": scales})
    checkpoint = Checkpoint.open(found)
    assert torch.equal(checkpoint.part("w"), decoded)
    assert torch.equal(checkpoint.part("w", rows=slice(3, 191, 2), columns=slice(5, 83)), decoded[3:191:2, 5:83])
    assert torch.equal(checkpoint.part("w", rows=slice(1, 9), is_transposed=True), decoded.T[1:9])


# -- gpt-oss -------------------------------------------------------------------------------------


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: PLC0415  seconds

    generator = torch.Generator().manual_seed(3)
    coded, decoded = Tensors(), Tensors()
    for name, tensor in tensors_of("gpt-oss").items():
        coded[name] = decoded[name] = tensor
        if name.endswith(("gate_up_proj", "down_proj")):
            del coded[name]
            blocks, scales = as_mxfp4(tuple(tensor.shape), generator)
            coded[f"{name}_blocks"], coded[f"{name}_scales"] = blocks, scales
            decoded[name] = convert_moe_packed_tensors(blocks, scales)
    config = read_config(family_directory("gpt-oss", "bfloat16"))
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    twin = write(tmp_path / "twin", config, decoded)
    found = write(tmp_path / "coded", {**config, "quantization_config": said}, coded)
    assert torch.equal(logits(found), logits(twin))
    if not native.unavailable():  # alternate rows of stacks stay in 4 bits
        assert torch.equal(logits(found, native.NativeOps()), logits(twin, native.NativeOps()))


# -- integers in words of 32 bits ----------------------------------------------------------------

PACKED: dict[str, tuple[dict[str, Any], Any, int, int, bool]] = {
    "awq": (AWQ, as_awq, 4, GROUP, False),
    "awq, one group": ({**AWQ, "group_size": -1}, as_awq, 4, 0, False),
    "gptq": (GPTQ, lambda whole: as_gptq(whole, 1), 4, GROUP, False),
    "gptq, own order": ({**GPTQ, "desc_act": True}, lambda whole: as_gptq(whole, 1), 4, GROUP, True),
    "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, lambda whole: as_gptq(whole, 0), 4, GROUP, False),
    "gptq, 8 bits": ({**GPTQ, "bits": 8}, lambda whole: as_gptq(whole, 1), 8, GROUP, False),
    "compressed": (
        *(pack_quantized(symmetric=False), lambda whole: as_compressed(whole, weight_zero_point=zeros_of(whole))),
        *(4, GROUP, False),
    ),
    "compressed, own order": (
        *(pack_quantized(actorder="group"), lambda whole: as_compressed(whole, weight_g_idx=whole.groups)),
        *(4, GROUP, True),
    ),
    "compressed, 8 bits": (pack_quantized(num_bits=8, strategy="channel"), as_compressed, 8, 0, False),
}


def packed_twins(family: str, case: str, tmp_path: Path) -> tuple[Path, Path]:
    """A model with packed integers, and one with the weights that they mean."""
    said, pack, bits, group, mixed = PACKED[case]
    generator, coded, decoded = torch.Generator().manual_seed(len(case)), Tensors(), Tensors()
    for name, tensor in tensors_of(family).items():
        coded[name] = decoded[name] = tensor
        if name.endswith("_proj.weight"):
            del coded[name]
            whole = Integers(tensor.shape, bits, group, generator, mixed=mixed)
            parts, module = pack(whole), name.removesuffix(".weight")
            has_zeros = "qzeros" in parts or "weight_zero_point" in parts
            half = torch.full_like(whole.zeros, 1 << bits - 1)
            decoded[name] = whole.weight(None if has_zeros else half)
            coded |= {f"{module}.{part}": one for part, one in parts.items()}
            if "g_idx" in parts and f"{module}.bias" not in coded:  # what GPTQ's tools write
                coded[f"{module}.bias"] = torch.zeros(len(tensor), dtype=torch.float16)
    config = read_config(family_directory(family, "bfloat16"))
    twin = write(tmp_path / "twin", config, decoded)
    return write(tmp_path / "coded", {**config, "quantization_config": said}, coded), twin


@pytest.mark.parametrize("family", ["glm4-moe", "phi3"])
@pytest.mark.parametrize("case", PACKED)
def test_packed_integers(family: str, case: str, tmp_path: Path) -> None:
    found, twin = packed_twins(family, case, tmp_path)
    assert torch.equal(logits(found), logits(twin))


def test_a_part_of_a_packed_weight(tmp_path: Path) -> None:
    """Slices that begin and end within words."""
    checkpoints = [Checkpoint.open(directory) for directory in packed_twins("qwen3", "gptq, own order", tmp_path)]
    name = "model.layers.1.mlp.down_proj.weight"
    parts = [one.part(name, rows=slice(3, 61, 2), columns=slice(5, 83)) for one in checkpoints]
    assert torch.equal(*parts)
    assert torch.equal(*(one.part(name, rows=slice(1, 9), is_transposed=True) for one in checkpoints))


def test_a_bias_that_is_not_zero_is_refused(tmp_path: Path) -> None:
    found, _ = packed_twins("qwen3", "gptq", tmp_path)
    raw = load_file(found / "model.safetensors")
    raw["model.layers.0.mlp.up_proj.bias"][3] = 1.0
    changed = write(tmp_path / "changed", read_config(found), raw)
    with pytest.raises(ModelError, match=r"holds tensor model\.layers\.0\.mlp\.up_proj\.bias"):
        check_headers(ModelConfig.from_directory(changed), Headers.read(changed))


def test_a_group_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    found, _ = packed_twins("qwen3", "gptq", tmp_path)
    raw = load_file(found / "model.safetensors")
    raw["model.layers.0.mlp.up_proj.g_idx"][3] = 99
    checkpoint = Checkpoint.open(write(tmp_path / "changed", read_config(found), raw))
    with pytest.raises(ModelError, match="g_idx names a group that does not exist"):
        checkpoint.part("model.layers.0.mlp.up_proj.weight")


# -- what is not built ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "bitsandbytes", "bits": 4}, 'quant_method (now "bitsandbytes") is not built'),
        ({"bits": 4}, "quant_method (now missing) is not built"),
        ({**FP8, "fmt": "e5m2"}, "quantization_config.fmt"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({**FP8, "something": 1}, "quantization_config.something"),
        (compressed("group", "int"), "weights.strategy"),
        (compressed("channel", "int", symmetric=False), "weights.symmetric"),
        (compressed("channel", "int", num_bits=4), "weights.num_bits"),
        ({**compressed("channel", "int"), "format": "marlin-24"}, "quantization_config.format"),
        ({**AWQ, "version": "gemv"}, "quantization_config.version"),
        ({**AWQ, "bits": 3}, "quantization_config.bits (now 3) is not built"),
        ({**AWQ, "group_size": 0}, "quantization_config.group_size"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "quantization_config.checkpoint_format"),
        ({**GPTQ, "dynamic": {"+:.*up_proj": {"bits": 8}}}, "quantization_config.dynamic"),
        ({**GPTQ, "something": 1}, "quantization_config.something"),
        (pack_quantized(actorder="group", num_bits=2), "weights.num_bits"),
        ({**compressed("channel", "int"), "sparsity_config": {"format": "x"}}, "sparsity_config"),
    ],
)
def test_what_is_not_built_is_refused_by_its_name(said: dict, named: str, tmp_path: Path) -> None:
    config = {**read_config(family_directory("qwen3", "bfloat16")), "quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_directory(tmp_path)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_values_without_their_scales_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of("qwen3")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    config = read_config(family_directory("qwen3", "bfloat16"))
    directory = write(tmp_path / "m", {**config, "quantization_config": FP8}, tensors)
    with pytest.raises(ModelError, match=f"{name} is float8_e4m3fn"):
        check_headers(ModelConfig.from_directory(directory), Headers.read(directory))
