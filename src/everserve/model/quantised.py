"""Matrices that stay in 8 or 4 bits in memory: on CPUs, whose products decode them in registers (csrc/ops/quantised.h).

    form        what is known of one from headers (forms.py): how many bytes it takes, before any of them is read
    matrix      its tensors: codes, scales and perhaps zero points

There are four kinds of codes, whatever the files' codec. What has 8 bits stays where the files are mapped; what has 4
is packed anew, into one order (`pack`). A matrix has the same numbers as the one that is decoded: its products have the
same bits.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from everserve.model.forms import UNIT, Codes, Form, padded
from everserve.native.structs import source

_DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "uint8": 4}  # enum dtype, E8M0
_E4M3_TINY, _TINY = 4, 2.0**-117  # enum codes
_descriptor = source("ops", "quantised.h").packer("quantised")
_INTEGERS = torch.arange(16.0)
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOATS = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """Rows of codes, which may be apart; scales, and zero points as int8."""

    form: Form
    codes: Tensor  # uint8
    scales: Tensor
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        form = self.form
        assert form.is_readable(), f"groups of {form.group} columns cannot be read"
        assert self.codes.dtype is torch.uint8 and self.codes.shape == (form.rows, form.row_bytes)
        assert self.codes.stride(1) == 1 or form.row_bytes == 1
        for tensor in (self.scales, self.zeros):
            assert tensor is None or (tensor.shape == form.scales_shape and tensor.is_contiguous())
        assert self.scales.dtype is torch_dtype(form.scale_dtype) and (self.zeros is not None) == form.has_zeros

    @property
    def shape(self) -> tuple[int, int]:
        return self.form.rows, self.form.columns

    @property
    def nbytes(self) -> int:
        return sum(self.form.part_bytes)

    @cached_property
    def _packed(self) -> Tensor:
        form = self.form
        zeros = self.zeros.data_ptr() if self.zeros is not None else 0
        dtypes = _DTYPES[form.scale_dtype], _DTYPES[form.dtype]
        packed = _descriptor.pack(
            self.codes.data_ptr(), self.scales.data_ptr(), zeros, self.codes.stride(0), form.scales_shape[1],
            form.rows_per_scale, form.first_row, form.group, self._kind_in_c, *dtypes,
        )  # fmt: skip
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    @property
    def _kind_in_c(self) -> int:
        is_tiny = self.form.kind is Codes.E4M3 and bool(((self.scales.abs() < _TINY) & (self.scales != 0)).any())
        return _E4M3_TINY if is_tiny else self.form.kind

    def data_ptr(self) -> int:
        """Where C reads what it is: a struct quantised, which lives as long as this object."""
        return self._packed.data_ptr()

    def parts(self) -> Iterator[Tensor]:
        """The bytes of its tensors, each padded to whole words, as they lie in the memory of a slot."""
        for tensor in (self.codes, self.scales, self.zeros):
            if tensor is not None:
                flat = tensor.contiguous().view(torch.uint8).view(-1)
                missing = padded(len(flat)) - len(flat)
                yield torch.cat([flat, flat.new_zeros(missing)]) if missing else flat

    def in_order(self, rows: list[int]) -> "QuantisedMatrix":
        """These rows of it, copied."""
        found, order = _with_scales_of_rows(self), torch.tensor(rows)
        zeros = found.zeros[order] if found.zeros is not None else None
        return QuantisedMatrix(replace(found.form, rows=len(rows)), found.codes[order], found.scales[order], zeros)

    def decode(self) -> Tensor:
        """The matrix in its dtype."""
        form = self.form
        of_row = (torch.arange(form.rows) + form.first_row) // form.rows_per_scale
        of_column = torch.arange(form.columns) // form.group
        scales = self.scales
        if form.scale_dtype == "uint8":
            scales = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
        numbers = self._numbers()[:, : form.columns]
        if self.zeros is not None:
            numbers = numbers - self.zeros.float()[of_row][:, of_column]
        return (numbers * scales.float()[of_row][:, of_column]).to(torch_dtype(form.dtype))

    def _numbers(self) -> Tensor:
        codes = self.codes.contiguous()
        match self.form.kind:
            case Codes.E4M3:
                return codes.view(torch.float8_e4m3fn).float()
            case Codes.INT8:
                return codes.view(torch.int8).float()
        halves = codes.view(self.form.rows, -1, 1, UNIT // 2) >> torch.tensor([[0], [4]], dtype=torch.uint8) & 15
        return (_INTEGERS if self.form.kind is Codes.INT4 else _FLOATS)[halves.flatten(1).int()]


Matrix = Tensor | QuantisedMatrix


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def matrix_at(form: Form, memory: Tensor) -> QuantisedMatrix:
    """The matrix whose tensors lie one behind the other in these bytes."""
    parts, end = [], 0
    for num_bytes in form.part_bytes:
        parts.append(memory[end : end + num_bytes])
        end += padded(num_bytes)
    codes, scales = parts[0].view(form.rows, form.row_bytes), parts[1].view(torch_dtype(form.scale_dtype))
    zeros = parts[2].view(torch.int8).view(form.scales_shape) if form.has_zeros else None
    return QuantisedMatrix(form, codes, scales.view(form.scales_shape), zeros)


def decoded(matrix: Matrix) -> Tensor:
    return matrix.decode() if isinstance(matrix, QuantisedMatrix) else matrix


def pack(numbers: Tensor) -> Tensor:
    """Rows of numbers below 16, as codes: whole units, filled up with zeros."""
    missing = -numbers.shape[1] % UNIT
    if missing:
        numbers = torch.nn.functional.pad(numbers, (0, missing))
    low, high = numbers.to(torch.uint8).view(len(numbers), -1, 2, UNIT // 2).unbind(2)
    return (low | high << 4).flatten(1)


def merged(matrices: Iterable[QuantisedMatrix]) -> QuantisedMatrix | None:
    """All of them on top of each other, copied into one; None if they are too different."""
    spread = [_with_scales_of_rows(matrix) for matrix in matrices]
    forms = {replace(matrix.form, rows=0) for matrix in spread}
    if len(forms) > 1:
        return None
    form = replace(spread[0].form, rows=sum(matrix.form.rows for matrix in spread))
    zeros = [matrix.zeros for matrix in spread if matrix.zeros is not None]
    return QuantisedMatrix(
        form,
        torch.cat([matrix.codes for matrix in spread]),
        torch.cat([matrix.scales for matrix in spread]),
        torch.cat(zeros) if zeros else None,
    )


def _with_scales_of_rows(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """The same with scales for each row."""
    form = matrix.form
    of_row = (torch.arange(form.rows) + form.first_row) // form.rows_per_scale
    zeros = matrix.zeros[of_row] if matrix.zeros is not None else None
    return QuantisedMatrix(replace(form, rows_per_scale=1, first_row=0), matrix.codes, matrix.scales[of_row], zeros)
