"""Quantised matrices from the tensors that codecs.py has found, not decoded. forms.py says which there are."""

from collections.abc import Callable

import torch
from torch import Tensor

from everserve.errors import ModelError
from everserve.model.codecs import MXFP4_GROUP, Codec, Coded
from everserve.model.forms import Codes, Part
from everserve.model.packed import Packed
from everserve.model.quantised import QuantisedMatrix, pack
from everserve.model.unpacking import integers, regular_groups, zero_points

_COLUMNS_AT_ONCE = 128  # of packed integers: what is made of them on the way stays in a cache
_MOST_SCALE = 2.0**119  # kernels multiply scales of fp8 by 2^8
View = Callable[[str], Tensor]


def read(part: Part, view: View) -> QuantisedMatrix:
    """The matrix; its codes are a view of the files if these hold them so. `view`: a tensor of the files."""
    if isinstance(part.coded, Packed):
        return _read_packed(part, part.coded, view)
    return (_read_scaled if part.coded.codec is Codec.SCALED else _read_mxfp4)(part, part.coded, view)


# -- one scale for a tensor, a row or a block ----------------------------------------------------


def _read_scaled(part: Part, coded: Coded, view: View) -> QuantisedMatrix:
    values, scales = view(coded.values), view(coded.scales)
    block_rows, block_columns = coded.block
    scales = scales.view(-(-coded.shape[0] // block_rows), -(-coded.shape[1] // block_columns))
    num_rows, num_groups = part.form.scales_shape
    rows, columns = part.rows, part.columns
    first = rows.start // block_rows
    of_row = torch.arange(num_rows) + first if rows.step == 1 else torch.tensor(rows) // block_rows
    of_group = (columns.start + torch.arange(num_groups) * part.form.group) // block_columns
    found = scales[of_row][:, of_group]
    if not bool((found.abs() < _MOST_SCALE).all()):
        raise ModelError(f"tensor {coded.scales} has a scale that is no number; download the model again")
    codes = values[_slice(rows)][:, _slice(columns)].view(torch.uint8)
    return QuantisedMatrix(part.form, codes, found)


# -- gpt-oss -------------------------------------------------------------------------------------


def _read_mxfp4(part: Part, coded: Coded, view: View) -> QuantisedMatrix:
    values, scales = view(coded.values), view(coded.scales)
    if part.plane is not None:
        values, scales = values[part.plane], scales[part.plane]
    first = part.columns.start // MXFP4_GROUP
    groups = slice(first, first + part.form.scales_shape[1])
    pairs = values[_slice(part.rows)][:, groups].flatten(1)
    numbers = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)[:, : len(part.columns)]
    return QuantisedMatrix(part.form, pack(numbers), scales[_slice(part.rows)][:, groups].contiguous())


# -- packed integers -----------------------------------------------------------------------------


def _read_packed(part: Part, coded: Packed, view: View) -> QuantisedMatrix:
    packing, form, rows, columns = coded.packing, part.form, part.rows, part.columns
    is_transposed, words = packing.form.is_transposed, view(coded.words)
    scales = view(coded.scales)
    scales = scales.T if is_transposed else scales
    if coded.groups and not torch.equal(view(coded.groups).flatten().long(), regular_groups(coded)):
        raise ModelError(f"tensor {coded.groups} is not in order, as config.json says; download the model again")

    codes = torch.empty(form.rows, form.row_bytes, dtype=torch.uint8)
    for first in range(0, form.columns, _COLUMNS_AT_ONCE):
        some = columns[first : first + _COLUMNS_AT_ONCE]
        if is_transposed:
            numbers = integers(words, packing.form.axis, some, rows, packing).to(torch.uint8).T
        else:
            numbers = integers(words, packing.form.axis, rows, some, packing).to(torch.uint8)
        if form.kind is Codes.INT4:
            packed = pack(numbers)
            codes[:, first // 2 : first // 2 + packed.shape[1]] = packed
        else:
            codes[:, first : first + len(some)] = numbers ^ 0x80  # with a sign
    size = packing.group_size or coded.shape[1]
    of_group = (columns.start + torch.arange(form.scales_shape[1]) * form.group) // size
    return QuantisedMatrix(
        form, codes, scales[_slice(rows)][:, of_group].contiguous(), _zeros(part, coded, view, of_group)
    )


def _zeros(part: Part, coded: Packed, view: View, of_group: Tensor) -> Tensor | None:
    if not part.form.has_zeros:
        return None
    if not coded.zeros:
        return torch.full(part.form.scales_shape, 8, dtype=torch.int8)
    zeros = zero_points(coded, view, part.rows)[:, of_group]
    return (zeros - (128 if part.form.kind is Codes.INT8 else 0)).to(torch.int8).contiguous()


def _slice(some: range) -> slice:
    return slice(some.start, some.stop, some.step)
