"""Weights in fewer bits as tools write them, made one number at a time; and small models whose weights are such."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from everserve.model.bundled import DEMO_MODEL
from everserve.model.checkpoint import Checkpoint
from everserve.model.forms import Codes, Form
from everserve.model.quantised import QuantisedMatrix, pack, torch_dtype
from tests.support.families import family_directory, read_config

Tensors = dict[str, Tensor]


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


# -- 8 bits with scales --------------------------------------------------------------------------


def spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """A scale for every number."""
    rows = scales.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def quantise(weight: Tensor, block: tuple[int, int], to: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales, and the weight that they mean."""
    most = 448.0 if to is torch.float8_e4m3fn else 127.0
    weight, (rows, columns) = weight.float(), block
    tiles = [[tile.abs().max() / most for tile in row.split(columns, 1)] for row in weight.split(rows)]
    scales = torch.tensor(tiles)
    every = spread(scales, block, weight.shape)
    values = (weight / every).round().to(to) if to is torch.int8 else (weight / every).to(to)
    return values, scales, (values.float() * every).to(torch.bfloat16)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}


def compressed(strategy: str, kind: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "type": kind}}
    form = "float-quantized" if kind == "float" else "int-quantized"
    said = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**said, "ignore": ["lm_head"], "config_groups": {"group_0": group}}


# -- MXFP4 ---------------------------------------------------------------------------------------


def as_mxfp4(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random blocks, and exponents of which most weights are small."""
    num, columns, rows = shape
    blocks = torch.randint(256, (num, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(122, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)


# -- integers in words of 32 bits ----------------------------------------------------------------

GROUP = 16
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}


def pack_quantized(**changes: Any) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": True,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": {**weights, **changes}}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return {**said, "ignore": ["lm_head"], "config_groups": {"group_0": group}}


def as_int32(word: int) -> int:
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def words_of(numbers: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Packed along rows of numbers, the first of `order` in the lowest bits."""
    per_word, lines = 32 // bits, []
    for line in numbers.tolist():
        groups = [line[first : first + per_word] for first in range(0, len(line), per_word)]
        placed = [[group[i] for i in order] if order else group for group in groups]
        lines.append([as_int32(sum(number << bits * i for i, number in enumerate(group))) for group in placed])
    return torch.tensor(lines, dtype=torch.int32)


class Integers:
    """A random weight of integers, with the group of each column."""

    def __init__(self, shape: torch.Size, bits: int, group: int, generator: torch.Generator, *, mixed: bool) -> None:
        (rows, columns), most = shape, 1 << bits
        self.bits, self.groups = bits, torch.arange(columns, dtype=torch.int32) // (group or columns)
        num_groups = int(self.groups[-1]) + 1
        if mixed:
            self.groups = self.groups[torch.randperm(columns, generator=generator)]
        self.numbers = torch.randint(most, shape, generator=generator)
        self.zeros = torch.randint(most, (rows, num_groups), generator=generator)
        self.scales = (torch.rand(rows, num_groups, generator=generator) * 0.5 / most).half()

    def weight(self, zeros: Tensor | None = None) -> Tensor:
        zeros, groups = self.zeros if zeros is None else zeros, self.groups.long()
        return ((self.numbers - zeros[:, groups]) * self.scales.float()[:, groups]).to(torch.bfloat16)


def as_awq(whole: Integers) -> Tensors:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words, zeros = words_of(whole.numbers.T, 4, order), words_of(whole.zeros.T, 4, order)
    return {"qweight": words, "qzeros": zeros, "scales": whole.scales.T}


def as_gptq(whole: Integers, less: int) -> Tensors:
    """`less`: what the first format takes from every zero point. A zero point of 0 borrows from its neighbour."""
    each = sum(less << i for i in range(0, 32, whole.bits))
    zeros = torch.tensor(
        [[as_int32(word - each) for word in line] for line in words_of(whole.zeros.T, whole.bits).tolist()]
    )
    words = words_of(whole.numbers, whole.bits).T
    return {"qweight": words, "qzeros": zeros.int(), "scales": whole.scales.T, "g_idx": whole.groups}


def as_compressed(whole: Integers, **more: Tensor) -> Tensors:
    words = words_of(whole.numbers, whole.bits)
    return {"weight_packed": words, "weight_scale": whole.scales, "weight_shape": torch.tensor([1, 1]), **more}


def zeros_of(whole: Integers) -> Tensor:
    return words_of(whole.zeros.T, whole.bits).T


# -- as they are read ----------------------------------------------------------------------------


def random_matrix(form: Form, generator: torch.Generator) -> QuantisedMatrix:
    """Any codes but fp8's NaN."""
    if form.kind >= Codes.INT4:
        codes = pack(torch.randint(16, (form.rows, form.columns), generator=generator, dtype=torch.uint8))
    else:
        codes = torch.randint(256, (form.rows, form.columns), generator=generator, dtype=torch.uint8)
        if form.kind is Codes.E4M3:
            codes[(codes & 127) == 127] = 5
    if form.scale_dtype == "uint8":
        scales = torch.randint(112, 130, form.scales_shape, generator=generator, dtype=torch.uint8)
    else:
        scales = (torch.rand(form.scales_shape, generator=generator) * 0.1 + 1e-3).to(torch_dtype(form.scale_dtype))
    zeros = None
    if form.has_zeros:
        least, most = (0, 16) if form.kind is Codes.INT4 else (-128, 128)
        zeros = torch.randint(least, most, form.scales_shape, generator=generator, dtype=torch.int8)
    return QuantisedMatrix(form, codes, scales, zeros)


# -- models --------------------------------------------------------------------------------------

Made = Callable[[Tensor, torch.Generator], tuple[Tensors, Tensor]]  # what replaces a weight, by the end of its name


def _scaled(block: tuple[int, int] | None, to: torch.dtype, suffix: str) -> Made:
    def make(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        values, scales, decoded = quantise(weight, block or (1, weight.shape[1]), to)
        return {"weight": values, f"weight{suffix}": scales}, decoded

    return make


def _packed(bits: int, group: int, tensors: Callable[[Integers], Tensors]) -> Made:
    def make(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        whole = Integers(weight.shape, bits, group, generator, mixed=False)
        made = tensors(whole)
        has_zeros = "qzeros" in made or "weight_zero_point" in made
        return made, whole.weight(None if has_zeros else torch.full_like(whole.zeros, 1 << bits - 1))

    return make


_WIDE = {"group_size": 32}
FORMATS: dict[str, tuple[dict[str, Any], Made]] = {
    "fp8-blocks": ({**FP8, "weight_block_size": [32, 32]}, _scaled((32, 32), torch.float8_e4m3fn, "_scale_inv")),
    "fp8-rows": (compressed("channel", "float"), _scaled(None, torch.float8_e4m3fn, "_scale")),
    "int8-rows": (compressed("channel", "int"), _scaled(None, torch.int8, "_scale")),
    "awq": ({**AWQ, **_WIDE}, _packed(4, 32, as_awq)),
    "gptq": ({**GPTQ, **_WIDE}, _packed(4, 32, lambda whole: as_gptq(whole, 1))),
    "gptq-8": ({**GPTQ, **_WIDE, "bits": 8}, _packed(8, 32, lambda whole: as_gptq(whole, 1))),
    "compressed": (pack_quantized(**_WIDE), _packed(4, 32, as_compressed)),
    "compressed-zeros": (
        pack_quantized(symmetric=False, **_WIDE),
        _packed(4, 32, lambda whole: as_compressed(whole, weight_zero_point=zeros_of(whole))),
    ),
}


def write_weight(directory: Path, name: str, rows: int, columns: int) -> Path:
    """A directory with one weight in this format, `m.weight`."""
    said, make = FORMATS[name]
    generator = torch.Generator().manual_seed(len(name))
    tensors, _ = make(torch.randn(rows, columns, generator=generator), generator)
    config = read_config(family_directory("qwen3", "bfloat16"))
    return write(directory, {**config, "quantization_config": said}, {f"m.{end}": t for end, t in tensors.items()})


def quantised_twins(family: str, name: str, directory: Path) -> tuple[Path, Path]:
    """A model with the projections of a family's in this format, and one with the weights that they mean."""
    said, make = FORMATS[name]
    generator, coded, decoded = torch.Generator().manual_seed(7), Tensors(), Tensors()
    checkpoint = Checkpoint.open(family_directory(family, "bfloat16"))
    for weight in checkpoint.names():
        coded[weight] = decoded[weight] = checkpoint.read(weight)
    for weight in sorted(coded):
        if weight.endswith("_proj.weight"):
            tensors, meant = make(coded.pop(weight), generator)
            scale = 0.15 / meant.float().std().clamp(min=1e-6)  # as large as what they replace
            factor = torch.exp2(scale.log2().round())
            tensors = {
                end: (tensor * factor).to(tensor.dtype) if "scale" in end else tensor for end, tensor in tensors.items()
            }
            decoded[weight] = (meant.float() * factor).to(meant.dtype)
            coded |= {f"{weight.removesuffix('.weight')}.{end}": tensor for end, tensor in tensors.items()}
    config = read_config(family_directory(family, "bfloat16"))
    found = write(directory / "coded", {**config, "quantization_config": said}, coded)
    twin = write(directory / "twin", config, decoded)
    for one in (found, twin):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_MODEL / file, one / file)
    return found, twin


def rewritten(directory: Path, said: dict[str, Any], tensors: Tensors) -> None:
    """The same files with other tensors, and other things said of them."""
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= said
    (directory / "config.json").write_text(json.dumps(config))
    save_file(load_file(directory / "model.safetensors") | tensors, directory / "model.safetensors")
