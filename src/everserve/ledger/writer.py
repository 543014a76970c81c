"""What csrc/writer.c needs to write the events of plain streams without Python, and what it leaves.

While a stream is *followed* there, its journal, ring and commit are C's: Python has them again after `take_back`.
"""

import ctypes
import functools
import mmap
from array import array
from collections.abc import Sequence
from typing import Any

from everserve.ledger.connections import Commit, Connection
from everserve.ledger.layout import C_COMMITS, COMMIT_WORDS, H_HANDLING, R_LENGTH, WORD
from everserve.ledger.ledger import Ledger
from everserve.ledger.requests import Request
from everserve.native import BuildError, library
from everserve.native.structs import source

_declared = source("ledger", "writer.c")
_constants = _declared.constants
WRITTEN, LEFT, UNSENT = (_constants[name] for name in ("WRITTEN", "LEFT", "UNSENT"))
assert _constants["COMMIT_BYTES"] == COMMIT_WORDS * WORD
_MAX_TOKEN_BYTES: int = _constants["MAX_TOKEN_BYTES"]
_SPELLED_BYTES = _declared.struct("spelled").size
_BYTES_PER_TOKEN = 16  # of memory for spellings: more than tokens have on average
_JOURNAL_WORD = 4


class _Vocabulary(ctypes.Structure):
    _fields_ = _declared.fields("vocabulary")


class Plain(ctypes.Structure):
    """One stream that is followed."""

    _fields_ = _declared.fields("plain")


class Spellings:
    """The bytes of tokens, as far as they were asked for. Memory is taken as it is used."""

    def __init__(self, num_tokens: int) -> None:
        self._tokens = _private(max(1, num_tokens) * _SPELLED_BYTES)
        self._words = memoryview(self._tokens).cast("I")
        self._bytes = _private(max(1, num_tokens) * _BYTES_PER_TOKEN + _MAX_TOKEN_BYTES)
        self._num_used = 0
        self._struct = _Vocabulary(tokens=_address(self._tokens), bytes=_address(self._bytes), num_tokens=num_tokens)
        self.address = ctypes.addressof(self._struct)

    def learn(self, token: int, spelling: bytes) -> None:
        """Nothing happens if it is known, or has no room."""
        end = self._num_used + len(spelling)
        if not 0 <= token < self._struct.num_tokens or self._words[2 * token] or end > len(self._bytes):
            return
        self._bytes[self._num_used : end] = spelling
        self._words[2 * token + 1] = len(spelling)
        self._words[2 * token] = self._num_used + 1  # last: now it is known
        self._num_used = end


def write(streams: Sequence[int], tokens: Sequence[int]) -> bytes:
    """Write and send each token's event; the streams by their addresses. Returns what became of each token, or nothing
    if all were written and sent."""
    num = len(tokens)
    outcomes = ctypes.create_string_buffer(num)
    places, numbers = array("Q", streams), array("i", tokens)
    if _write()(places.buffer_info()[0], numbers.buffer_info()[0], num, outcomes):
        return outcomes.raw
    return b""


def follow(
    ledger: Ledger,
    connection: Connection,
    request: Request,
    fd: int,
    spellings: Spellings,
    around: tuple[bytes, bytes],
    pending: bytes,
) -> Plain | None:
    """From now on these are C's. `around`: an event before and after its text; both must live as long as this.
    `pending`: the first bytes of a character. None: there is no room left in the pages at hand."""
    ring, commit = connection.ring, connection.commit
    if not ring.room or not request.room:
        return None
    base, (before, after) = address_of(ledger), around
    at = base + ring.end_byte
    journal = base + _JOURNAL_WORD * request.next_word
    return Plain(
        vocabulary=spellings.address,
        journal=journal,
        journal_stop=journal + _JOURNAL_WORD * request.room,
        length=base + WORD * (request.word + R_LENGTH),
        ring=at,
        ring_stop=at + ring.room,
        unsent=at,
        copies=base + connection.at + C_COMMITS * WORD,
        handling=base + H_HANDLING * WORD,
        reference=connection.index + 1,
        seq=commit.seq,
        ring_end=commit.ring_end,
        num_rendered=commit.num_rendered,
        journal_length=request.length,
        inbox_begin=commit.inbox_begin,
        request=commit.request,
        flags=commit.flags,
        before=_bytes_at(before),
        after=_bytes_at(after),
        before_bytes=len(before),
        after_bytes=len(after),
        fd=fd,
        num_pending=len(pending),
        pending=int.from_bytes(pending, "little"),
    )


def take_back(plain: Plain, connection: Connection, request: Request) -> int:
    """Now they are Python's again. Returns how many bytes were not sent."""
    if plain.num_written:
        connection.ring.end = plain.ring_end
        connection.commit = Commit(
            plain.seq,
            plain.ring_end,
            plain.num_rendered,
            plain.journal_length,
            plain.inbox_begin,
            plain.request,
            plain.flags,
        )
        request.go_on_at(plain.journal_length)
    return int(plain.ring - plain.unsent)


def pending_of(plain: Plain) -> bytes:
    """The first bytes of a character whose last ones have not come."""
    return int(plain.pending).to_bytes(WORD, "little")[: plain.num_pending]


def address_of_plain(plain: Plain) -> int:
    return ctypes.addressof(plain)


def prepare() -> None:
    """Compiles the library if need be, and loads it."""
    _write()


def address_of(ledger: Ledger) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(ledger.memory))


@functools.cache
def _write() -> Any:
    try:
        function = ctypes.CDLL(str(library("ledger"))).es_ledger_write
    except OSError as e:
        raise BuildError(f"cannot load the ledger's library: {e}") from e
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p]
    function.restype = ctypes.c_int64
    return function


def _private(num_bytes: int) -> mmap.mmap:
    """Memory that each gateway of a keeper has for itself, as it has what Python knows of it."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _bytes_at(data: bytes) -> int:
    """Where a bytes object has them. It must outlive the use."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
