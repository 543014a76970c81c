"""Checkpoint: the safetensors files of a model directory, memory-mapped; any slice of any tensor.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes:

    | n: u64 | {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [a, b]}, ..} | .... a=====b .... |
                                                                                      ^ 8 + n: offsets count from here

`open` reads only headers. `read` gives views of the mapping where it can, and otherwise copies only what was asked
for, so that a worker that needs one expert, or some heads, touches the bytes of those and no others. The mapping is
read-only: a stray write to a weight ends the process instead of corrupting it.
"""

import json
import math
import mmap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everserve.errors import ModelError

Selection = slice | Sequence[int] | Tensor

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BROKEN = "the download is incomplete or it is not a safetensors file; download it again"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One tensor: bytes [start, stop) of a file, counted from the file's beginning."""

    raw: Tensor  # uint8: the whole file, mapped
    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Checkpoint:
    """All tensors of one model directory."""

    def __init__(self, path: Path, entries: dict[str, _Entry]) -> None:
        self.path = path
        self.bytes_read = 0  # handed out so far, as views or copies
        self._entries = entries

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Map all files and check all headers; no tensor is touched."""
        directory = Path(path)
        if (directory / _SINGLE).is_file():
            return cls(directory, _open_file(directory / _SINGLE))
        if not (directory / _INDEX).is_file():
            raise ModelError(
                f"{directory} has neither {_SINGLE} nor {_INDEX}; download the model's safetensors files, or convert it"
            )
        weight_map = _weight_map(directory / _INDEX)
        files = {file: _open_file(directory / file) for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            if name not in files[file]:
                raise ModelError(
                    f"{directory / file} lacks tensor {name}, which {_INDEX} says it has; download it again"
                )
        return cls(directory, {name: files[file][name] for name, file in weight_map.items()})

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).dtype

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
        tensor = _view(self._entry(name))
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
        self, name: str, plane: int | None = None, rows: slice | None = None, columns: slice | None = None
    ) -> Tensor:
        """A view of the mapping; contiguous unless it is some of the columns."""
        tensor = _view(self._entry(name))
        if plane is not None:
            tensor = tensor[plane]
        if rows is not None:
            tensor = tensor[rows]
        if columns is not None:
            tensor = tensor[:, columns]
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ModelError(
                f"{self.path} has no tensor {name}; the download is incomplete or config.json is another's"
            )
        return self._entries[name]


def _index(selection: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(selection, dtype=torch.int64)


def _view(entry: _Entry) -> Tensor:
    raw = entry.raw[entry.start : entry.stop]
    if entry.start % entry.dtype.itemsize:
        raw = raw.clone()  # files by old writers: no view of this dtype can begin here
    return raw.view(entry.dtype).view(entry.shape)


def _weight_map(file: Path) -> dict[str, str]:
    """Tensor name -> name of the file, in the same directory, that holds it."""
    try:
        weight_map = json.loads(file.read_bytes())["weight_map"]
        valid = all(isinstance(name, str) and Path(name).name == name for name in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise ModelError(f"{file} is not an index of safetensors files of its own directory; download it again")
    return dict(weight_map)


def _open_file(file: Path) -> dict[str, _Entry]:
    try:
        with file.open("rb") as stream:
            mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{file} is missing; download it") from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{file} cannot be mapped ({error}); {_BROKEN}") from None

    data_start = 8 + int.from_bytes(mapping[:8], "little")
    if len(mapping) < 8 or data_start > min(len(mapping), 8 + _MAX_HEADER_BYTES):
        raise ModelError(f"{file} ends within its header; {_BROKEN}")
    try:
        header = json.loads(mapping[8:data_start])
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ModelError(f"{file} has no readable header; {_BROKEN}")

    raw = _as_tensor(mapping)
    header.pop("__metadata__", None)
    return {name: _parse_entry(file, name, fields, raw, len(mapping), data_start) for name, fields in header.items()}


def _as_tensor(mapping: mmap.mmap) -> Tensor:
    """The whole file as bytes. PyTorch warns that it cannot prevent writes; the read-only mapping does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _parse_entry(file: Path, name: str, fields: Any, raw: Tensor, num_bytes: int, data_start: int) -> _Entry:
    try:
        dtype_name, shape, (start, stop) = str(fields["dtype"]), fields["shape"], fields["data_offsets"]
        valid = all(type(number) is int and number >= 0 for number in [start, stop, *shape])
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise ModelError(f"{file} has an unreadable header entry for tensor {name}; {_BROKEN}")
    if dtype_name not in _DTYPES:
        raise ModelError(f"{file} holds tensor {name} as {dtype_name}; use the checkpoint that is not quantised")
    dtype = _DTYPES[dtype_name]
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ModelError(
            f"{file} gives tensor {name} {stop - start} bytes, which do not fit its shape {shape}; {_BROKEN}"
        )
    if data_start + stop > num_bytes:
        raise ModelError(f"{file} ends before the end of tensor {name}; {_BROKEN}")
    return _Entry(raw=raw, start=data_start + start, stop=data_start + stop, dtype=dtype, shape=tuple(shape))
