"""Hashes: the chain of a stream's tokens, and the key of a stream."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from everserve.kvlog.library import load

START = 0x9E3779B97F4A7C15  # the chain before the first token
KEY_BYTES = 16


def chains(tokens: Sequence[int] | NDArray[np.int32], before: int = START) -> NDArray[np.uint64]:
    """The chain after each token: a hash of all tokens of the stream up to and including that one.

    `before` is the chain before the first of these tokens.
    """
    tokens_T = np.ascontiguousarray(tokens, np.int32)
    chains_T = np.empty(len(tokens_T), np.uint64)
    load().brief.es_log_chains(tokens_T.ctypes.data, len(tokens_T), int(before), chains_T.ctypes.data)
    return chains_T


def key_of(stream_id: str) -> bytes:
    """A stream in a log."""
    return hashlib.blake2b(stream_id.encode(), digest_size=KEY_BYTES).digest()
