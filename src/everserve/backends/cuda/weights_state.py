"""What the weights memory of a seat with the attention role holds, for the next incarnation: may it serve without
loading a byte? (Expert seats have a slot table instead: memory/weights/slot_table.py.)

Device memory that outlives its worker does not say what is in it, nor whether it was written to the end. A page of host
memory beside it does:

    magic | state: empty, loading or complete | identity (SHA-256)

    begin(identity)      state = loading, then the identity
    ... write all weights, and wait for the device ...
    complete(identity)   state = complete

A writer that dies before the last line leaves `loading`, and its successor begins again. There may be several writers
at once, and readers beside them: a predecessor that was given up but still lives, and other seats with the same weights
(`Design.weights_owner`). All of them write the same bytes to the same places, so that changes nothing. At worst a page
says `loading` about weights that are complete, and the next incarnation loads them once more.
"""

import dataclasses
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Sequence

from everserve.memory.names import WEIGHTS_STATE_BYTES
from everserve.model.config import ModelConfig
from everserve.tables.ids import Role

_MAGIC = 0x73746867696577  # "weights"
_LOADING, _COMPLETE = 1, 2
_WORD = struct.Struct("<Q")
_MAGIC_AT, _STATE_AT, _IDENTITY_AT = 0, 8, 64
_IDENTITY_BYTES = hashlib.sha256().digest_size


def identity_of(source: str, config: ModelConfig, dtype: str, roles: Sequence[Role]) -> bytes:
    """A hash of everything that decides which bytes lie where. `source`: which files."""
    described = [source, dataclasses.asdict(config), dtype, list(roles)]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()


class WeightsState:
    """The page, mapped. The descriptor stays the caller's, and may be closed."""

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        if size < WEIGHTS_STATE_BYTES:
            raise ValueError(f"the state of weights has {WEIGHTS_STATE_BYTES} bytes, this memory has {size}")
        self._page = mmap.mmap(fd, WEIGHTS_STATE_BYTES)

    def holds(self, identity: bytes) -> bool:
        """Whether these weights are there, all of them."""
        is_complete = self._word(_MAGIC_AT) == _MAGIC and self._word(_STATE_AT) == _COMPLETE
        return is_complete and self._identity() == identity

    def begin(self, identity: bytes) -> None:
        """From now on, until `complete`, what is there means nothing."""
        assert len(identity) == _IDENTITY_BYTES, identity
        self._set(_STATE_AT, _LOADING)
        self._page[_IDENTITY_AT : _IDENTITY_AT + _IDENTITY_BYTES] = identity
        self._set(_MAGIC_AT, _MAGIC)

    def complete(self, identity: bytes) -> None:
        """All of it is written, and the device has said so."""
        assert self._identity() == identity, "completed what was not begun"
        self._set(_STATE_AT, _COMPLETE)

    def close(self) -> None:
        self._page.close()

    def _identity(self) -> bytes:
        return self._page[_IDENTITY_AT : _IDENTITY_AT + _IDENTITY_BYTES]

    def _word(self, at: int) -> int:
        return int(_WORD.unpack_from(self._page, at)[0])

    def _set(self, at: int, value: int) -> None:
        _WORD.pack_into(self._page, at, value)
