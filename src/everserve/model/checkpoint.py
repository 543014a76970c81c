"""Checkpoint: the safetensors files of a model directory, memory-mapped; any slice of any tensor.

`open` reads only headers (headers.py, which says what a file looks like). `read` gives views of the mapping where it
can, and otherwise copies only what was asked for, so that a worker that needs one expert, or some heads, touches the
bytes of those and no others. The mapping is read-only: a stray write to a weight ends the process instead of
corrupting it.
"""

import mmap
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from everserve.errors import ModelError
from everserve.model.decoding import decode
from everserve.model.forms import Part
from everserve.model.headers import Entry, Headers
from everserve.model.quantised import QuantisedMatrix
from everserve.model.quantised_files import read

Selection = slice | Sequence[int] | Tensor


class Checkpoint:
    """All tensors of one model directory."""

    def __init__(self, headers: Headers) -> None:
        self.headers = headers
        self.bytes_read = 0  # handed out so far, as views or copies
        self._raw = {file: _map(file) for file in headers.files()}  # uint8: whole files

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Map all files and check all headers; no tensor is touched."""
        return cls(Headers.read(path))

    def names(self) -> frozenset[str]:
        return self.headers.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.headers.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.headers.dtype(name))
        return dtype

    def read(
        self,
        name: str,
        rows: Selection | None = None,
        columns: Selection | None = None,
        plane: int | None = None,
    ) -> Tensor:
        """A contiguous tensor: `plane` picks one matrix of a stack, `rows` and `columns` a part of it.

        Whole matrices and row slices are views of the mapping; anything else is a copy of the selected bytes alone.
        """
        tensor = self._view(name)
        if plane is not None:
            tensor = tensor[plane]
        # Slices first: they narrow the view for free, whatever the other selection is.
        if isinstance(rows, slice):
            tensor, rows = tensor[rows], None
        if isinstance(columns, slice):
            tensor, columns = tensor[:, columns], None
        if rows is not None and columns is not None:
            tensor = tensor[_index(rows)[:, None], _index(columns)]
        elif rows is not None:
            tensor = tensor.index_select(0, _index(rows))
        elif columns is not None:
            tensor = tensor.index_select(1, _index(columns))
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor.contiguous()

    def part(
        self,
        name: str,
        plane: int | None = None,
        rows: slice | None = None,
        columns: slice | None = None,
        *,
        is_transposed: bool = False,
    ) -> Tensor:
        """A view of the mapping; contiguous if it is whole rows, one behind the other. Of a weight that is coded, a
        decoded copy."""
        if (coded := self.headers.coded.get(name)) is not None:
            found = decode(coded, self._view, self.dtype(name), plane, rows, columns, is_transposed)
            self.bytes_read += found.nbytes
            return found
        tensor = self._view(name)
        if plane is not None:
            tensor = tensor[plane]
        if is_transposed:
            tensor = tensor.T
        if rows is not None:
            tensor = tensor[rows]
        if columns is not None:
            tensor = tensor[:, columns]
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def quantised(self, part: Part) -> QuantisedMatrix:
        """A part of a coded weight, not decoded."""
        found = read(part, self._view)
        self.bytes_read += found.nbytes
        return found

    def _view(self, name: str) -> Tensor:
        entry = self.headers.entry(name)
        raw = self._raw[entry.file][entry.start : entry.stop]
        if entry.start % entry.item_bytes:
            raw = raw.clone()  # files by old writers: no view of this dtype can begin here
        return raw.view(_dtype(entry)).view(entry.shape)


def _dtype(entry: Entry) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype


def _index(selection: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(selection, dtype=torch.int64)


def _map(file: Path) -> Tensor:
    """The whole file as bytes. PyTorch warns that it cannot prevent writes; the read-only mapping does."""
    try:
        with file.open("rb") as stream:
            mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be mapped ({error}); download it again") from None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)
