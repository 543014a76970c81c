"""The functions of csrc/*.c."""

import ctypes
import functools
from typing import Any

from everserve.native import BuildError, library


class Library:
    """`blocking` gives up the interpreter's lock around a call: for what copies. `brief` keeps it."""

    def __init__(self) -> None:
        path = str(library("kvlog"))
        try:
            self.blocking = ctypes.CDLL(path)
            self.brief = ctypes.PyDLL(path)
        except OSError as e:
            raise BuildError(f"cannot load the KV log library: {e}") from e
        pointer, packed, int64, uint64 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint64
        signatures: list[tuple[Any, list[Any], Any]] = [
            (self.brief.es_log_map, [int64, int64], int64),
            (self.brief.es_log_unmap, [pointer, int64], int64),
            (self.brief.es_log_find, [pointer, packed, pointer], int64),
            (self.brief.es_log_read, [pointer, int64, pointer], int64),
            (self.brief.es_log_last_seq, [pointer], uint64),
            (self.blocking.es_log_count_intact, [pointer, packed, int64, pointer], int64),
            (self.brief.es_log_begin, [pointer, int64, int64], int64),
            (self.brief.es_log_begin_next, [pointer, packed, packed], int64),
            (self.blocking.es_log_meanwhile, [pointer, int64], None),
            (self.blocking.es_log_finish, [pointer], int64),
            (self.brief.es_log_commit, [pointer, packed, int64, packed], int64),
            (self.brief.es_log_clear, [pointer, int64], int64),
            (self.blocking.es_log_copy_in, [pointer, pointer, packed, int64, pointer, packed], int64),
            (self.brief.es_log_chains, [pointer, int64, uint64, pointer], uint64),
            (self.brief.es_log_chains_of_rows, [pointer, pointer, int64, pointer, pointer], None),
        ]
        for function, arguments, result in signatures:
            function.argtypes, function.restype = arguments, result


@functools.cache
def load() -> Library:
    """Compiled on first use."""
    return Library()
