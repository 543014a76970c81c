"""What the safetensors files of a model directory hold, from their headers alone.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes:

    | n: u64 | {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [a, b]}, ..} | .... a=====b .... |
                                                                                      ^ 8 + n: offsets count from here

Everything that a file says is checked here, before anything reads a tensor. No torch: `everserve serve` looks at the
headers before it starts a process.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everserve.errors import ModelError
from everserve.model.codecs import Coded, Quantisation
from everserve.model.fields import Fields, parse_json, shown
from everserve.model.packed import Packed

# Names of the format -> the names of torch's dtypes, and their bytes.
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_NUMBERS = 10  # of an entry: two offsets, and a shape
_MOST_READ = 1 << 20  # bytes of a tensor that are looked at before it is loaded
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BROKEN = "the download is incomplete or it is not a safetensors file; download it again"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: bytes [start, stop) of a file, counted from the file's beginning."""

    file: Path
    start: int
    stop: int
    dtype: str  # a name of torch's
    item_bytes: int
    shape: tuple[int, ...]


class Headers:
    """All weights of one model directory: tensors, and what several of them make up (codecs.py)."""

    def __init__(self, path: Path, entries: dict[str, Entry], quantisation: Quantisation | None = None) -> None:
        self.path = path
        self._entries = entries
        self._quantisation = quantisation
        self.coded: Mapping[str, Coded | Packed] = {}
        parts = frozenset[str]()
        if quantisation is not None:
            self.coded, parts = quantisation.find(entries)
        self._names = frozenset(entries.keys() - parts | self.coded.keys())

    @classmethod
    def read(cls, path: str | Path) -> "Headers":
        directory = Path(path)
        config = directory / "config.json"
        quantisation = Quantisation.of(Fields.from_file(config)) if config.is_file() else None
        if (directory / _SINGLE).is_file():
            return cls(directory, _read_file(directory / _SINGLE), quantisation)
        if not has_files(directory):
            raise ModelError(
                f"{directory} has neither {_SINGLE} nor {_INDEX}; download the model's safetensors files, or convert it"
            )
        weight_map = read_weight_map(directory / _INDEX)
        files = {file: _read_file(directory / file) for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            if name not in files[file]:
                raise ModelError(
                    f"{directory / file} lacks tensor {name}, which {_INDEX} says it has; download it again"
                )
        return cls(directory, {name: files[file][name] for name, file in weight_map.items()}, quantisation)

    @property
    def method(self) -> str | None:
        """What weights are quantised with, as config.json names it."""
        return self._quantisation.method if self._quantisation is not None else None

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.coded[name].shape if name in self.coded else self.entry(name).shape

    def dtype(self, name: str) -> str:
        """A name of torch's: what it is loaded as."""
        if name in self.coded and self._quantisation is not None:
            return self._quantisation.dtype
        return self.entry(name).dtype

    def is_zero(self, name: str) -> bool:
        """Whether a small tensor has nothing but zeros."""
        entry = self.entry(name)
        if entry.stop - entry.start > _MOST_READ:
            return False
        with entry.file.open("rb") as stream:
            return not any(os.pread(stream.fileno(), entry.stop - entry.start, entry.start))

    def num_parameters(self) -> int:
        return sum(math.prod(entry.shape) for entry in self._entries.values())

    def files(self) -> frozenset[Path]:
        return frozenset(entry.file for entry in self._entries.values())

    def entry(self, name: str) -> Entry:
        """A tensor as it is in the files."""
        if name not in self._entries:
            raise ModelError(
                f"{self.path} has no tensor {name}; the download is incomplete or config.json is another's"
            )
        return self._entries[name]


def has_files(directory: Path) -> bool:
    """Whether there is something to read; not whether it is complete."""
    return (directory / _SINGLE).is_file() or (directory / _INDEX).is_file()


def files_of(directory: Path) -> tuple[str, ...]:
    """The names of the files that hold this directory's tensors, whether they are there or not."""
    is_divided = (directory / _INDEX).is_file() and not (directory / _SINGLE).is_file()
    return tuple(sorted(set(read_weight_map(directory / _INDEX).values()))) if is_divided else (_SINGLE,)


def read_weight_map(file: Path) -> dict[str, str]:
    """Tensor name -> name of the file, in the same directory, that holds it."""
    try:
        weight_map = parse_json(file.read_bytes())["weight_map"]
        valid = all(isinstance(name, str) and Path(name).name == name for name in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise ModelError(f"{file} is not an index of safetensors files of its own directory; download it again")
    return dict(weight_map)


def _read_file(file: Path) -> dict[str, Entry]:
    try:
        with file.open("rb") as stream:
            num_bytes, length = os.fstat(stream.fileno()).st_size, stream.read(8)
            data_start = 8 + int.from_bytes(length, "little")
            if len(length) < 8 or data_start > min(num_bytes, 8 + MAX_HEADER_BYTES):
                raise ModelError(f"{file} ends within its header; {_BROKEN}")
            text = stream.read(data_start - 8)
    except FileNotFoundError:
        raise ModelError(f"{file} is missing; download it") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}); {_BROKEN}") from None
    try:
        header = parse_json(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ModelError(f"{file} has no readable header; {_BROKEN}")
    header.pop("__metadata__", None)
    return {name: _parse_entry(file, name, fields, num_bytes, data_start) for name, fields in header.items()}


def _parse_entry(file: Path, name: str, fields: Any, num_bytes: int, data_start: int) -> Entry:
    try:
        dtype, shape, (start, stop) = str(fields["dtype"]), fields["shape"], fields["data_offsets"]
        numbers = [start, stop, *shape]
        valid = len(numbers) <= _MAX_NUMBERS and all(
            type(number) is int and 0 <= number < 1 << 63 for number in numbers
        )
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid or not name.isprintable():
        raise ModelError(f"{file} has an unreadable header entry for tensor {shown(name)}; {_BROKEN}")
    if dtype not in DTYPES:
        raise ModelError(f"{file} holds tensor {name} as {shown(dtype)}; use the checkpoint that is not quantised")
    dtype_name, item_bytes = DTYPES[dtype]
    if stop - start != math.prod(shape) * item_bytes:
        raise ModelError(
            f"{file} gives tensor {name} {stop - start} bytes, which do not fit its shape {shape}; {_BROKEN}"
        )
    if data_start + stop > num_bytes:
        raise ModelError(f"{file} ends before the end of tensor {name}; {_BROKEN}")
    return Entry(file, data_start + start, data_start + stop, dtype_name, item_bytes, tuple(shape))
