"""Weights from the tensors that codecs.py has found: and only the parts that are asked for."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from everserve.model.codecs import MXFP4_GROUP, Codec, Coded
from everserve.model.packed import Packed
from everserve.model.unpacking import ROWS_AT_ONCE, unpack

_ALL = slice(None)
_EXPONENT_OF_ONE = 127
_BYTES = torch.arange(256, dtype=torch.uint8)
_FP8 = _BYTES.view(torch.float8_e4m3fn).float()  # by the byte; looked up, which is quicker than converted
# By their 4 bits: a sign, two of an exponent, one of a fraction.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4 = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
# Both numbers of a byte, as one that is as wide as two: the first is in the low bits.
_MXFP4_PAIRS = torch.stack([_MXFP4[_BYTES.int() & 15], _MXFP4[_BYTES.int() >> 4]], dim=1).view(torch.int64).view(-1)


def decode(
    coded: Coded | Packed,
    view: Callable[[str], Tensor],
    dtype: torch.dtype,
    plane: int | None,
    rows: slice | None,
    columns: slice | None,
    is_transposed: bool,
) -> Tensor:
    """A part of a weight, as `Checkpoint.part` has it. `view`: a tensor of the files."""
    parts = rows or _ALL, columns or _ALL
    turned = is_transposed != coded.is_transposed
    in_files = parts[::-1] if turned else parts
    if isinstance(coded, Packed):
        assert plane is None, "packed weights are not stacked"
        return unpack(coded, view, dtype, *in_files, is_turned=turned)
    values, scales = view(coded.values), view(coded.scales)
    if plane is not None:
        values, scales = values[plane], scales[plane]
    read = _scaled if coded.codec is Codec.SCALED else _mxfp4
    found = read(coded, values, scales, *in_files, dtype)
    return found.T if turned else found


def _scaled(coded: Coded, values_RC: Tensor, scales: Tensor, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
    num_rows, num_columns = values_RC.shape
    scales = scales.float().view(-(-num_rows // coded.block[0]), -(-num_columns // coded.block[1]))
    of_row = torch.arange(num_rows)[rows] // coded.block[0]
    of_column = torch.arange(num_columns)[columns] // coded.block[1]
    values_RC = values_RC[rows][:, columns]
    found = torch.empty(values_RC.shape, dtype=dtype)
    for some in _parts(len(found)):
        blocks = of_row[some]
        blocks = blocks[:1] if bool((blocks == blocks[0]).all()) else blocks
        factors = scales[blocks][:, of_column] if scales.shape[1] > 1 else scales[blocks]
        found[some] = _widened(values_RC[some]) * factors
    return found


def _widened(values: Tensor) -> Tensor:
    if values.dtype is not torch.float8_e4m3fn:
        return values.float()
    return _FP8.index_select(0, values.contiguous().view(torch.uint8).view(-1).int()).view(values.shape)


def _mxfp4(
    coded: Coded, values_RGB: Tensor, scales_RG: Tensor, rows: slice, columns: slice, dtype: torch.dtype
) -> Tensor:
    """Decodes MXFP4."""
    values, scales = values_RGB[rows], scales_RG[rows]
    found = torch.empty(len(values), values.shape[1] * MXFP4_GROUP, dtype=dtype)
    for some in _parts(len(found)):
        exponents = scales[some].int() - _EXPONENT_OF_ONE
        pairs = _MXFP4_PAIRS.index_select(0, values[some].reshape(-1).int()).view(torch.float32)
        factors = torch.ldexp(torch.ones(exponents.shape), exponents)
        found[some] = (pairs.view(*exponents.shape, MXFP4_GROUP) * factors[..., None]).flatten(1)
    return found[:, columns]


def _parts(num_rows: int) -> Iterator[slice]:
    """A few rows each, so that what is made of them on the way stays in a cache."""
    yield from (slice(first, first + ROWS_AT_ONCE) for first in range(0, num_rows, ROWS_AT_ONCE))
