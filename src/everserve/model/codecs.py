"""Codecs: weights that files hold in fewer bits than they are computed with.

What `quantization_config` says is checked here, and which tensors of the files make up which weight is found by their
names. decoding.py makes the weight of them when it is loaded, in the dtype of the model; or it stays as it is, with the
same numbers (quantised.py). Activations are never quantised, whatever the files say of theirs.

    SCALED   X.weight (8 bits) * X.weight_scale_inv or X.weight_scale      fp8, compressed-tensors
             one scale for all, for each row, or for each block of rows and columns
    MXFP4    X_blocks (two numbers of 4 bits in a byte), X_scales (an exponent for 32 of them)      gpt-oss
    packed   integers of 4 or 8 bits in words of 32 (packed.py)                  AWQ, GPTQ, compressed-tensors

No torch: the gateway reads configs and headers too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from everserve.model import packed
from everserve.model.fields import Fields
from everserve.model.packed import Packed, Packing, Stored

MXFP4_GROUP = 32  # numbers that have one exponent
_METHODS = ("fp8", "mxfp4", "compressed-tensors", "awq", "gptq")
_EIGHT_BITS = ("float8_e4m3fn", "int8")
_SCALES = ("float32", "bfloat16", "float16")
# Of activations and of keys and values: these are not quantised here.
_UNUSED = (
    ".input_scale",
    ".input_scale_inv",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".k_zero_point",
    ".v_zero_point",
)


class Codec(StrEnum):
    SCALED = "scaled"
    MXFP4 = "mxfp4"


@dataclass(frozen=True)
class Coded:
    """One weight, and the tensors that it is made of."""

    codec: Codec
    values: str
    scales: str
    shape: tuple[int, ...]  # of the weight
    block: tuple[int, int] = (1, 1)  # rows and columns of a scale
    is_transposed: bool = False  # the tensors hold it so

    @property
    def parts(self) -> tuple[str, ...]:
        return self.values, self.scales


@dataclass(frozen=True)
class Quantisation:
    """What a config.json says of the codecs of its files. `dtype`: what weights are computed with."""

    method: str
    found: tuple[int, int] | Packing | None  # the blocks that have a scale, or how integers are packed
    dtype: str

    @classmethod
    def of(cls, fields: Fields) -> "Quantisation | None":
        """None: files hold the weights as they are."""
        if fields.has("compression_config"):
            raise fields.error("compression_config", "is not supported; use the checkpoint that is not quantised")
        said = fields.object("quantization_config")
        if not said.values:
            return None
        method = said.get("quant_method")
        if method not in _METHODS:
            known = ", ".join(_METHODS)
            raise said.error("quant_method", f"is not built; use weights in one of {known}, or not quantised")
        found = _READ[method](said)
        said.refuse_unread(str(method))
        text = fields.object("text_config")
        stated = (source.get(name) for source in (fields, text) for name in ("dtype", "torch_dtype"))
        return cls(str(method), found, next((str(name) for name in stated if name in _SCALES), "bfloat16"))

    def find(self, entries: Mapping[str, Stored]) -> tuple[Mapping[str, Coded | Packed], frozenset[str]]:
        """The weights that several tensors make up; and the tensors that are no weights by themselves."""
        coded: Mapping[str, Coded | Packed]
        unused: tuple[str, ...] = _UNUSED
        if isinstance(self.found, Packing):
            coded, unused = packed.find(self.found, entries), _UNUSED + self.found.form.unused
        elif self.method == "mxfp4":
            coded, unused = _find_mxfp4(entries), ()
        else:
            coded = self._find_scaled(entries)
        parts = {part for one in coded.values() for part in one.parts}
        parts |= {name for name in entries if unused and name.endswith(unused)}
        return coded, frozenset(parts - coded.keys())

    def _find_scaled(self, entries: Mapping[str, Stored]) -> dict[str, Coded]:
        """Those whose scales fit; the others are left, and refused as what they are."""
        coded = {}
        for name, entry in entries.items():
            if entry.dtype not in _EIGHT_BITS or len(entry.shape) != 2:
                continue
            scales = next((f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in entries), None)
            if scales is None or entries[scales].dtype not in _SCALES:
                continue
            block = self._block_of(entry.shape, entries[scales].shape)
            if block is not None:
                coded[name] = Coded(Codec.SCALED, name, scales, entry.shape, block)
        return coded

    def _block_of(self, shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
        rows, columns = shape
        if prod(scales) == 1:
            return rows, columns
        if scales in ((rows,), (rows, 1)):
            return 1, columns
        block = self.found
        if isinstance(block, tuple) and scales == (-(-rows // block[0]), -(-columns // block[1])):
            return block
        return None


def _find_mxfp4(entries: Mapping[str, Stored]) -> dict[str, Coded]:
    """gpt-oss has its experts stacked and transposed; the blocks are not."""
    coded = {}
    for name, entry in entries.items():
        weight = name.removesuffix("_blocks")
        scales = f"{weight}_scales"
        if weight == name or entry.dtype != "uint8" or len(entry.shape) != 4 or scales not in entries:
            continue
        num, rows, groups, num_bytes = entry.shape
        if 2 * num_bytes == MXFP4_GROUP and entries[scales].shape == (num, rows, groups):
            shape = (num, groups * MXFP4_GROUP, rows)
            coded[weight] = Coded(Codec.MXFP4, name, scales, shape, is_transposed=True)
    return coded


# -- what each method says -----------------------------------------------------------------------


def _read_fp8(said: Fields) -> tuple[int, int] | None:
    said.expect("fmt", "e4m3")
    said.expect("scale_fmt", "float", "ue8m0")  # of activations
    said.ignore("activation_scheme", "modules_to_not_convert", "ignored_layers", "dequantize", "kv_cache_scheme")
    return _block(said, "weight_block_size")


def _read_mxfp4(said: Fields) -> None:
    said.ignore("modules_to_not_convert", "dequantize")


def _read_compressed(said: Fields) -> tuple[int, int] | Packing | None:
    said.expect("format", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
    said.expect("quantization_status", "compressed", "frozen")
    said.ignore("ignore", "kv_cache_scheme", "global_compression_ratio", "version")
    for name in ("sparsity_config", "transform_config"):
        if said.object(name).values:
            raise said.error(name, "is not built; use the checkpoint that is not compressed")
    is_packed = said.get("format") == "pack-quantized"
    groups, found = said.object("config_groups"), set[tuple[int, int] | Packing | None]()
    for name in groups.values:
        if not name.isprintable():
            raise said.error("config_groups", "has a name that cannot be read; correct the file")
        group = groups.object(name)
        group.ignore("targets", "input_activations", "output_activations", "format")
        weights = group.object("weights")
        found.add(packed.read_compressed(weights) if is_packed else _read_scaled(weights))
        weights.refuse_unread("compressed-tensors")
        group.refuse_unread("compressed-tensors")
    if len(found - {None}) > 1:
        raise said.error("config_groups", "has blocks of several sizes, which is not built")
    return next(iter(found - {None}), None)


def _read_scaled(weights: Fields) -> tuple[int, int] | None:
    """What it says of one group of modules."""
    weights.expect("num_bits", 8)
    weights.expect("type", "float", "int")
    weights.expect("strategy", "channel", "tensor", "block")
    weights.expect("symmetric", True)
    weights.expect("dynamic", False)
    weights.ignore("observer", "observer_kwargs", "group_size", "actorder", "scale_dtype", "zp_dtype")
    return _block(weights, "block_structure")


def _block(said: Fields, name: str) -> tuple[int, int] | None:
    value = said.get(name)
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n < 1 << 20 for n in value):
        return value[0], value[1]
    raise said.error(name, "must be two sizes; correct the file")


_READ: dict[str, Callable[[Fields], tuple[int, int] | Packing | None]] = {
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
    "compressed-tensors": _read_compressed,
    "awq": packed.read_awq,
    "gptq": packed.read_gptq,
}
