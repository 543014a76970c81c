"""The functions of csrc/pieces.c."""

import ctypes
import functools
from typing import Any

from everserve.native import BuildError, library
from everserve.native.structs import source


class PoolAt(ctypes.Structure):
    """struct pool in csrc/pieces.c: addresses, and the shape."""

    _fields_ = source("pieces", "pieces.c").fields("pool")
    blocks: int
    words: int
    owners: int


class ParityAt(ctypes.Structure):
    """struct parity in csrc/pieces.c."""

    _fields_ = source("pieces", "pieces.c").fields("parity")


class Library:
    """Words of a step are written at once (`brief`); what copies gives up the interpreter's lock (`blocking`)."""

    def __init__(self) -> None:
        path = str(library("pieces"))
        try:
            self.blocking = ctypes.CDLL(path)
            self.brief = ctypes.PyDLL(path)
        except OSError as e:
            raise BuildError(f"cannot load the library of KV pieces: {e}") from e
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        signatures: list[tuple[Any, list[Any], Any]] = [
            (self.brief.es_pieces_sign, [pointer, pointer, pointer, int64, pointer, int64], None),
            (self.blocking.es_pieces_mirror, [pointer, pointer, pointer, int64, pointer, int64], None),
            (
                self.blocking.es_pieces_parity,
                [pointer, pointer, int64, pointer, pointer, int64, pointer],
                None,
            ),
            (
                self.blocking.es_pieces_fetch,
                [pointer, pointer, int64, pointer, int64, pointer, int64, pointer, pointer, int64, pointer, pointer],
                int64,
            ),
        ]
        for function, arguments, result in signatures:
            function.argtypes, function.restype = arguments, result


@functools.cache
def load() -> Library:
    """Compiled on first use."""
    return Library()
