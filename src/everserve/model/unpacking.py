"""Packed integers as weights: what packed.py describes, computed.

A few rows of the files at a time, so that what is made of them on the way stays in a cache: with a single thread, which
is what a worker has while it loads, a weight of four bits then takes some nanoseconds.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from everserve.errors import ModelError
from everserve.model.packed import Packed, Packing

ROWS_AT_ONCE = 64  # whole words


def unpack(
    coded: Packed,
    view: Callable[[str], Tensor],
    dtype: torch.dtype,
    rows: slice,
    columns: slice,
    *,
    is_turned: bool,
) -> Tensor:
    """These rows and columns of the files; `is_turned`: as columns and rows. `view`: a tensor of the files."""
    form = coded.packing.form
    shape = coded.shape[::-1] if form.is_transposed else coded.shape
    wanted, across = range(shape[0])[rows], range(shape[1])[columns]
    words, group_values = view(coded.words), _GroupValues(coded, view, across)
    found = torch.empty((len(across), len(wanted)) if is_turned else (len(wanted), len(across)), dtype=dtype)
    at_once = min(ROWS_AT_ONCE, coded.packing.group_size or ROWS_AT_ONCE)
    for first in range(0, len(wanted), at_once):
        some = wanted[first : first + at_once]
        zeros, scales = group_values.of(some)
        numbers = integers(words, form.axis, some, across, coded.packing).sub_(zeros).float()
        into = found[:, first : first + at_once] if is_turned else found[first : first + at_once]
        into.copy_(numbers.mul_(scales).to(dtype).T if is_turned else numbers.mul_(scales))
    return found


class _GroupValues:
    """Zero points and scales of all groups, for some columns of the files."""

    def __init__(self, coded: Packed, view: Callable[[str], Tensor], across: range) -> None:
        packing, self._are_rows = coded.packing, coded.packing.form.is_transposed
        scales = view(coded.scales)
        num_groups = scales.shape[0 if self._are_rows else 1]
        self._groups = _groups(coded, view, num_groups)  # of each column of the weight
        columns = across if self._are_rows else range(num_groups)
        self._scales = scales[:, columns.start : columns.stop : columns.step].float()
        self._zeros: Tensor | None = None
        self._half = torch.tensor(1 << packing.bits - 1, dtype=torch.int32)
        if coded.zeros:
            self._zeros = _zeros_in_files(coded, view, range(scales.shape[0]), columns)
        self._of_columns = None if self._are_rows else self._groups[across.start : across.stop : across.step]

    def of(self, rows: range) -> tuple[Tensor, Tensor]:
        """Zeros and scales, as they meet the integers of these rows."""
        zeros = self._half if self._zeros is None else self._of(self._zeros, rows)
        return zeros, self._of(self._scales, rows)

    def _of(self, values: Tensor, rows: range) -> Tensor:
        if self._of_columns is not None:
            return values[rows.start : rows.stop : rows.step][:, self._of_columns]
        groups = self._groups[rows.start : rows.stop : rows.step]
        first = int(groups[0])
        return values[first : first + 1] if bool((groups == first).all()) else values[groups]


def _zeros_in_files(coded: Packed, view: Callable[[str], Tensor], rows: range, columns: range) -> Tensor:
    """Zero points, as the files have rows and columns."""
    packing = coded.packing
    words = view(coded.zeros) + torch.tensor(packing.added).to(torch.int32)  # may wrap, as it did when written
    return integers(words, 1 if packing.form.is_transposed else 0, rows, columns, packing)


def zero_points(coded: Packed, view: Callable[[str], Tensor], rows: range) -> Tensor:
    """Those of all groups, for these rows of the weight."""
    is_transposed, shape = coded.packing.form.is_transposed, view(coded.scales).shape
    groups = range(shape[0] if is_transposed else shape[1])
    found = _zeros_in_files(coded, view, *((groups, rows) if is_transposed else (rows, groups)))
    return found.T if is_transposed else found


def integers(words: Tensor, axis: int, rows: range, columns: range, packing: Packing) -> Tensor:
    """The numbers at these rows and columns; along `axis` several share a word."""
    per_word, mask = packing.per_word, (1 << packing.bits) - 1
    order = packing.form.order if packing.bits == 4 else range(per_word)
    shifts = torch.tensor([place * packing.bits for place in order], dtype=torch.int32)
    shared = rows if axis == 0 else columns
    first, end = shared[0] // per_word, shared[-1] // per_word + 1
    within = slice(shared[0] - first * per_word, shared[-1] + 1 - first * per_word, shared.step)
    if axis == 0:
        some = words[first:end, columns.start : columns.stop : columns.step]
        return ((some[:, None] >> shifts[:, None]) & mask).flatten(0, 1)[within]
    some = words[rows.start : rows.stop : rows.step, first:end]
    return ((some[..., None] >> shifts) & mask).flatten(1)[:, within]


def regular_groups(coded: Packed) -> Tensor:
    """The group of each column, where columns have no order of their own."""
    num_columns = coded.shape[1]
    return torch.arange(num_columns) // (coded.packing.group_size or num_columns)


def _groups(coded: Packed, view: Callable[[str], Tensor], num_groups: int) -> Tensor:
    """The group of each column."""
    if not coded.groups:
        return regular_groups(coded)
    groups = view(coded.groups).flatten().long()
    if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
        raise ModelError(f"tensor {coded.groups} names a group that does not exist; download the model again")
    return groups
