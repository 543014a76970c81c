"""Hashes: the chain of a stream's tokens, and the key of a stream.

KV that was computed under a mask of experts has another chain than exact KV of the same tokens: where it begins, the
mask's number is mixed in, so nothing behind that passes for exact. The KV of streams with a salt has other chains from
the first token on.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from everserve.kvlog.library import load
from everserve.tables.requests import Masked

START = 0x9E3779B97F4A7C15  # the chain before the first token
KEY_BYTES = 16
_SALTED = 0x165667B19E3779F9
_UNDER_MASK = 0xC2B2AE3D27D4EB4F  # no chain of tokens alone comes by here, but one in 2^64


def chains(tokens: Sequence[int] | NDArray[np.int32], before: int = START) -> NDArray[np.uint64]:
    """The chain after each token: a hash of all tokens of the stream up to and including that one.

    `before` is the chain before the first of these tokens.
    """
    tokens_T = np.ascontiguousarray(tokens, np.int32)
    chains_T = np.empty(len(tokens_T), np.uint64)
    load().brief.es_log_chains(tokens_T.ctypes.data, len(tokens_T), int(before), chains_T.ctypes.data)
    return chains_T


def start_of(salt: bytes) -> int:
    """The chain before the first token of a stream with this salt."""
    if not salt:
        return START
    return int(chains(np.frombuffer(hashlib.blake2b(salt, digest_size=16).digest(), np.int32), START ^ _SALTED)[-1])


def marked_chains(
    tokens: Sequence[int] | NDArray[np.int32], masked: Masked | None, start: int = START
) -> NDArray[np.uint64]:
    """The chain after each token, from the first one on."""
    if masked is None or masked.position >= len(tokens):
        return chains(tokens, start)
    exact_T = chains(tokens[: masked.position], start)
    return np.concatenate([exact_T, chains(tokens[masked.position :], _under(exact_T, masked, start))])


def chain_before(tokens: Sequence[int] | NDArray[np.int32], masked: Masked | None, start: int = START) -> int:
    """The chain from which that of the token after these is computed."""
    if masked is not None and masked.position == len(tokens):
        return _under(chains(tokens, start), masked, start)
    return int(marked_chains(tokens, masked, start)[-1]) if len(tokens) else start


def _under(exact_T: NDArray[np.uint64], masked: Masked, start: int) -> int:
    """The chain from which a mask begins, behind these."""
    before = int(exact_T[-1]) if len(exact_T) else start
    return int(chains([masked.mask_id & 0x7FFFFFFF], before ^ _UNDER_MASK)[0])


def key_of(stream_id: str) -> bytes:
    """A stream in a log."""
    return hashlib.blake2b(stream_id.encode(), digest_size=KEY_BYTES).digest()
