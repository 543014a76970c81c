"""Integers of 4 or 8 bits in words of 32, with a scale and a zero point for each group of columns of a weight.

    weight[o, i] = (number[o, i] - zero[o, group(i)]) * scale[o, group(i)]

                 the words                         zero points                       in a word
    AWQ          X.qweight  [I, O / 8], turned     X.qzeros [groups, O / 8]          numbers 0 2 4 6 1 3 5 7
    GPTQ         X.qweight  [I / 8, O], turned     X.qzeros [groups, O / 8], - 1     in order, lowest bits first
    compressed   X.weight_packed [O, I / 8]        X.weight_zero_point [O / 8, groups], or half of what there is

Scales are `X.scales` [groups, O] or `X.weight_scale` [O, groups]. A group is so many columns in a row, or what a tensor
of the files says of each column (`g_idx`, where GPTQ has chosen an order of its own). GPTQ's first format has its zero
points written with 1 taken from each, over whole words; its second one (`gptq_v2`) as they are.

What files say is checked here; unpacking.py computes. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

from everserve.model.fields import Fields

_WORD_BITS = 32
_SCALES = ("float32", "bfloat16", "float16")
_IN_ORDER, _OF_AWQ = tuple(range(8)), (0, 4, 1, 5, 2, 6, 3, 7)


class Stored(Protocol):
    """What a header says of a tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Form:
    """How one format names its tensors and lays them out."""

    words: str
    zeros: str
    scales: str
    groups: str
    is_transposed: bool  # the tensors have columns of the weight as rows
    axis: int  # of the stored words, along which numbers share a word; zero points do along the weight's rows
    order: tuple[int, ...] = _IN_ORDER  # in which place of its word each of eight numbers is
    needs_zeros: bool = True
    unused: tuple[str, ...] = ()


AWQ = Form(".qweight", ".qzeros", ".scales", ".g_idx", True, 1, _OF_AWQ)
GPTQ = Form(".qweight", ".qzeros", ".scales", ".g_idx", True, 0)
COMPRESSED = Form(
    ".weight_packed", ".weight_zero_point", ".weight_scale", ".weight_g_idx", False, 1,
    needs_zeros=False, unused=(".weight_shape",),
)  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """What config.json says of packed integers."""

    form: Form
    bits: int
    group_size: int  # columns; 0: all of them
    added: int = 0  # to every word of zero points
    is_ordered: bool = True  # groups are columns in a row, also where tensors say of each column which it is in

    @property
    def per_word(self) -> int:
        return _WORD_BITS // self.bits


@dataclass(frozen=True)
class Packed:
    """One weight: the names of the tensors that it is made of, empty where there is none."""

    packing: Packing
    words: str
    scales: str
    zeros: str
    groups: str
    shape: tuple[int, ...]  # of the weight

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.words, self.scales, self.zeros, self.groups)))

    @property
    def is_transposed(self) -> bool:
        return self.packing.form.is_transposed


def find(packing: Packing, entries: Mapping[str, Stored]) -> dict[str, Packed]:
    """The weights whose tensors fit together; the others are left, and missed."""
    found = {}
    for name in entries:
        module = name.removesuffix(packing.form.words)
        if module != name and (one := _packed(packing, module, entries)) is not None:
            found[f"{module}.weight"] = one
    return found


def _packed(packing: Packing, module: str, entries: Mapping[str, Stored]) -> Packed | None:
    form = packing.form
    words, scales = f"{module}{form.words}", f"{module}{form.scales}"
    zeros, groups = (name if name in entries else "" for name in (f"{module}{form.zeros}", f"{module}{form.groups}"))
    if len(entries[words].shape) != 2 or entries[words].dtype != "int32" or scales not in entries:
        return None
    stored = [*entries[words].shape]
    stored[form.axis] *= packing.per_word
    rows, columns = stored[::-1] if form.is_transposed else stored
    num_groups = -(-columns // (packing.group_size or max(columns, 1)))
    fits = entries[scales].dtype in _SCALES and entries[scales].shape == _stored(form, rows, num_groups)
    fits &= rows % packing.per_word == 0 or not zeros
    if zeros:
        of_zeros = _stored(form, rows // packing.per_word, num_groups)
        fits &= (entries[zeros].dtype, entries[zeros].shape) == ("int32", of_zeros)
    if groups:
        fits &= entries[groups].dtype in ("int32", "int64") and prod(entries[groups].shape) == columns
    if not fits or (form.needs_zeros and not zeros):
        return None
    return Packed(packing, words, scales, zeros, groups, (rows, columns))


def _stored(form: Form, rows: int, num_groups: int) -> tuple[int, int]:
    return (num_groups, rows) if form.is_transposed else (rows, num_groups)


# -- what each method says -----------------------------------------------------------------------


def read_awq(said: Fields) -> Packing:
    said.expect("version", "gemm", "GEMM")  # how the words are laid out
    said.expect("format", "gemm")
    said.expect("zero_point", True)
    said.ignore("modules_to_not_convert", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "backend")
    _ignore_how_it_was_made(said)
    return Packing(AWQ, _bits(said, "bits", 4), _group_size(said))


def read_gptq(said: Fields) -> Packing:
    form = said.get("checkpoint_format", said.get("format", "gptq"))
    said.expect("checkpoint_format", "gptq", "gptq_v2")
    said.expect("format", "gptq", "gptq_v2")
    said.expect("is_marlin_format", False)
    said.expect("pack_dtype", "int32")
    said.ignore("sym", "static_groups", "true_sequential", "damp_percent", "damp_auto_increment", "dataset")
    said.ignore("model_name_or_path", "model_file_base_name", "tokenizer", "modules_in_block_to_quantize", "batch_size")
    said.ignore("block_name_to_quantize", "use_cuda_fp16", "use_exllama", "exllama_config", "max_input_length")
    said.ignore(
        "module_name_preceding_first_block", "model_seqlen", "cache_block_outputs", "disable_exllama", "backend"
    )
    _ignore_how_it_was_made(said)
    for name in said.object("dynamic").values:
        if not name.startswith("-:"):  # these modules are not quantised at all, which the tensors show
            raise said.error("dynamic", "has modules of other sizes, which is not built; use another checkpoint")
    bits = _bits(said, "bits", 4, 8)
    each = sum(1 << i for i in range(0, _WORD_BITS, bits))
    is_ordered = said.get("desc_act") is False
    return Packing(GPTQ, bits, _group_size(said), 0 if form == "gptq_v2" else each, is_ordered)


def read_compressed(weights: Fields) -> Packing:
    """`weights`: what it says of one group of modules."""
    weights.expect("type", "int")
    weights.expect("strategy", "group", "channel")
    weights.expect("dynamic", False)
    weights.ignore("symmetric", "observer", "observer_kwargs", "block_structure", "scale_dtype", "zp_dtype")
    strategy = weights.get("strategy")
    if strategy == "channel":
        weights.ignore("group_size")
    size = _group_size(weights) if strategy == "group" else 0
    is_ordered = weights.get("actorder") not in (True, "group")
    return Packing(COMPRESSED, _bits(weights, "num_bits", 4, 8), size, is_ordered=is_ordered)


def _ignore_how_it_was_made(said: Fields) -> None:
    said.ignore("method", "meta", "lm_head", "quantizer", "offload_to_disk", "offload_to_disk_path", "pack_impl")
    said.ignore("mse", "mock_quantization", "act_group_aware", "adapter", "failsafe", "hyb_act", "rotation")


def _bits(said: Fields, name: str, *built: int) -> int:
    bits = said.integer(name)
    if bits not in built:
        raise said.error(name, f"is not built; only {' or '.join(map(str, built))} is")
    return bits


def _group_size(said: Fields) -> int:
    """-1 means all columns."""
    if said.get("group_size") == -1:
        return 0
    return said.integer("group_size", maximum=1 << 20)
