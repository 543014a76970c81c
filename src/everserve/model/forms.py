"""How matrices lie in memory that stay in the few bits that files hold them in (quantised.py): found from headers, so
that the memory of slots is planned before anything is read.

A part of a weight may have no such form; then it is decoded. That is so where columns have an order of their own
(`g_idx` of GPTQ with `desc_act`), where groups are too small for kernels, or where files hold the part turned. Where a
part begins within a group of columns, groups are divided: the scales of their parts are copies, and the numbers are the
same. So slices need not begin where blocks do.

No torch: `everserve serve` plans the memory.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

from everserve.model.codecs import MXFP4_GROUP, Codec, Coded
from everserve.model.config import ModelConfig
from everserve.model.headers import Headers
from everserve.model.layout import Layout, Source
from everserve.model.packed import Packed
from everserve.tables.calls import num_biases

UNIT = 32  # columns of 4 bits that are packed together
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
_STEP = 16  # columns that a product takes at once
_WORD = 8  # bytes; each tensor of a matrix begins at a multiple in the memory of a slot


class Codes(IntEnum):
    """enum codes in csrc/ops/quantised.h."""

    E4M3 = 0
    INT8 = 1
    INT4 = 2
    E2M1 = 3

    @property
    def unit(self) -> int:
        """Groups are multiples of so many columns, unless there is one."""
        return UNIT if self >= Codes.INT4 else _STEP


@dataclass(frozen=True)
class Form:
    """How a matrix lies in memory."""

    kind: Codes
    rows: int
    columns: int
    group: int  # columns that have one scale
    rows_per_scale: int
    first_row: int  # of those that have the first scales: how many lie in front of the matrix
    scale_dtype: str  # a name of torch's; uint8: exponents of powers of two
    has_zeros: bool
    dtype: str  # what its numbers are rounded to

    @property
    def row_bytes(self) -> int:
        """Bytes of codes in a row."""
        return -(-self.columns // UNIT) * UNIT // 2 if self.kind >= Codes.INT4 else self.columns

    @property
    def scales_shape(self) -> tuple[int, int]:
        return -(-(self.first_row + self.rows) // self.rows_per_scale), -(-self.columns // self.group)

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """The bytes of each tensor."""
        num = math.prod(self.scales_shape)
        zeros = (num,) if self.has_zeros else ()
        return self.rows * self.row_bytes, num * ITEM_BYTES[self.scale_dtype], *zeros

    @property
    def num_bytes(self) -> int:
        """What it takes in the memory of a slot."""
        return sum(map(padded, self.part_bytes))

    def is_readable(self) -> bool:
        """Whether products can read it."""
        return self.group >= self.columns or self.group % self.kind.unit == 0


def padded(num_bytes: int) -> int:
    return -(-num_bytes // _WORD) * _WORD


@dataclass(frozen=True)
class Part:
    """Rows and columns of a weight that several tensors make up."""

    coded: Coded | Packed
    plane: int | None
    rows: range
    columns: range
    form: Form


def part_of(
    headers: Headers,
    name: str,
    plane: int | None,
    rows: slice | None,
    columns: slice | None,
    is_transposed: bool,
    dtype: str,
) -> Part | None:
    """None: it has to be decoded, or is not coded at all."""
    coded = headers.coded.get(name)
    if coded is None or is_transposed != (isinstance(coded, Coded) and coded.is_transposed):
        return None
    shape = coded.shape[-2:]
    every = [range(size) for size in (shape[::-1] if is_transposed else shape)]
    some_rows, some_columns = every[0][rows or slice(None)], every[1][columns or slice(None)]
    if some_columns.step != 1 or not some_rows or not some_columns:
        return None
    scale_dtype = headers.entry(coded.scales).dtype
    if isinstance(coded, Packed):
        form = _form_of_packed(coded, some_rows, some_columns, scale_dtype, dtype)
    elif coded.codec is Codec.SCALED:
        kind = Codes.INT8 if headers.entry(coded.values).dtype == "int8" else Codes.E4M3
        form = _form_of_scaled(coded, kind, some_rows, some_columns, scale_dtype, dtype)
    else:
        group = math.gcd(MXFP4_GROUP, some_columns.start)
        form = Form(Codes.E2M1, len(some_rows), len(some_columns), group, 1, 0, "uint8", False, dtype)
    if form is None or not form.is_readable():
        return None
    return Part(coded, plane, some_rows, some_columns, form)


def _form_of_scaled(coded: Coded, kind: Codes, rows: range, columns: range, scale_dtype: str, dtype: str) -> Form:
    block_rows, block_columns = coded.block
    group = len(columns) if block_columns >= coded.shape[1] else math.gcd(block_columns, columns.start)
    per_scale, first = (block_rows, rows.start % block_rows) if rows.step == 1 else (1, 0)
    return Form(kind, len(rows), len(columns), group, per_scale, first, scale_dtype, False, dtype)


def _form_of_packed(coded: Packed, rows: range, columns: range, scale_dtype: str, dtype: str) -> Form | None:
    packing = coded.packing
    if coded.groups and not packing.is_ordered:
        return None
    size = packing.group_size or coded.shape[1]
    group = len(columns) if size >= coded.shape[1] else math.gcd(size, columns.start)
    kind = Codes.INT4 if packing.bits == 4 else Codes.INT8
    has_zeros = bool(coded.zeros) or kind is Codes.INT4
    return Form(kind, len(rows), len(columns), group, 1, 0, scale_dtype, has_zeros, dtype)


def source_part(headers: Headers, source: Source, dtype: str) -> Part | None:
    """The part of the files that a source is. `dtype`: the widest that weights are kept in."""
    where = source.name, source.plane, source.rows, source.columns, source.is_transposed
    return part_of(headers, *where, dtype_of(headers, source, dtype))


def dtype_of(headers: Headers, source: Source, dtype: str) -> str:
    """What a weight is loaded as: no wider than `dtype`, never widened."""
    if source.is_exact:
        return "float32"
    in_file = headers.dtype(source.name)
    return dtype if ITEM_BYTES[dtype] < ITEM_BYTES[in_file] else in_file


@dataclass(frozen=True)
class ShardForm:
    """How a shard lies in memory, as one piece: its matrices, and biases behind them."""

    matrices: tuple[Form, Form, Form] | None  # None: they are not quantised
    num_weights: int  # of which `dtype` are, with biases
    num_biases: int
    dtype: str

    @property
    def num_bytes(self) -> int:
        if self.matrices is None:
            return self.num_weights * ITEM_BYTES[self.dtype]
        return sum(form.num_bytes for form in self.matrices) + padded(self.num_biases * ITEM_BYTES[self.dtype])


def shard_form(layout: Layout, headers: Headers, dtype: str, layer: int, shard: int) -> ShardForm:
    """`dtype`: the widest that weights are kept in."""
    config, sources = layout.config, layout.shard(layer, shard)
    cut = config.cut(layer)
    biases = num_biases(config.hidden_size, cut.shard_size) if cut.has_bias else 0
    gate, up, down = (source_part(headers, source, dtype) for source in sources.matrices)
    forms = (gate.form, up.form, down.form) if gate and up and down else None
    return ShardForm(forms, cut.num_weights(config.hidden_size), biases, dtype_of(headers, sources.gate, dtype))


def shard_bytes(config: ModelConfig, headers: Headers, dtype: str) -> tuple[int, ...]:
    """What the largest shard of each FFN takes; () where nothing is quantised, and the dtype says it."""
    if not headers.coded:
        return ()
    layout, widest = Layout.of(config, headers), config.dtype if dtype == "auto" else dtype
    return tuple(
        max(shard_form(layout, headers, widest, cut.layer, shard).num_bytes for shard in range(cut.num_shards))
        for cut in config.cuts
    )
