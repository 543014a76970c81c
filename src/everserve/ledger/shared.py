"""SharedTable: what the gateways of one address know of each other, in memory that all of them have.

    | header | a row of each gateway | the streams that each keeps | what each has counted |

A gateway writes its own row and reads those of the others. Nothing is locked, so a number may be old when it is used:
two gateways may both give a worker its last place, and one stream waits there instead of here. The row of a gateway
that has died stays until its successor writes it, for its streams come back; only its keeper notes that it does not
serve.

One number must be taken by one gateway only: how many seeds were given. That is the position of the file, which the
kernel moves in one piece, and all gateways have the same open file.
"""

import mmap
import os
import struct
import zlib
from typing import NamedTuple

from everserve.ledger.layout import NUM_RANKS, WORD

_MAGIC = 0x656C_6261_7431_3130  # "011table"
_HEADER_BYTES = 4 << 10
NUM_KEYS = 1024

# A row, in words.
_SERVES = 0  # it accepts connections
_CONNECTIONS, _STREAMS, _POISON = 1, 2, 3  # how many it has; of streams, how many run that may be poison
_TURN = 8  # the stream that is next, and waits for want of room only
_KEYS = 64  # of each key, streams; behind them, places
_RANKS = _KEYS + 2 * NUM_KEYS  # of each rank, its streams of this gateway, and its incarnation
_ROW_WORDS = 4096
assert _RANKS + NUM_RANKS <= _ROW_WORDS

_KEPT = struct.Struct("<16sQ")  # the digest of a stream's name, since when it is kept
_NUM_KEPT = 1 << 14  # of each gateway

_COUNTED_HEAD = struct.Struct("<QQQ")  # of each of two copies: its number, its length, and a check of both and the rest
_COUNTED_BYTES = 4 << 20  # of a copy; it takes no memory as far as it is not used

_COUNT_BITS = 16  # of the word of a rank, for streams and for their requests; the rest is the incarnation
_MOST = (1 << _COUNT_BITS) - 1
_TURN_FIELDS = struct.Struct("<dqqqqq")


class Turn(NamedTuple):
    """A stream that waits for room, as the gateways compare them."""

    share: float  # what its key has for its weight, with one more
    key: int  # a number of its key
    priority: int
    num_places: int  # of its request
    since_ns: int  # when it came

    def is_before(self, other: "Turn") -> bool:
        """Who is next, as in the line of one gateway (plan/fairness.py), but for the requests' last turns."""
        if self.key == other.key:
            return self[2:] < other[2:]
        return (self.share, self.since_ns) < (other.share, other.since_ns)


class SharedTable:
    """The table, as one gateway sees it."""

    def __init__(self, fd: int, number: int, num_gateways: int) -> None:
        """The descriptor stays the caller's, and must stay open."""
        self.number = number
        self.numbers = range(num_gateways)
        self._fd = fd
        self._map = mmap.mmap(fd, _num_bytes(num_gateways))
        self._memory = memoryview(self._map)
        self._words = self._memory.cast("Q")
        self._rows = [(_HEADER_BYTES // WORD) + other * _ROW_WORDS for other in self.numbers]
        self._own = self._rows[number]
        self._others = [row for row in self._rows if row != self._own]
        self._counted_at = [_counted_at(num_gateways, other) for other in self.numbers]
        self._num_saved = max((number for number, _ in self._copies(number)), default=0)
        self._kept_at = [_kept_at(num_gateways, other) for other in self.numbers]

    @staticmethod
    def create(num_gateways: int) -> int:
        """A descriptor of the memory of a new one."""
        fd = os.memfd_create("gateways", os.MFD_CLOEXEC)
        os.ftruncate(fd, _num_bytes(num_gateways))
        os.pwrite(fd, _MAGIC.to_bytes(WORD, "little"), 0)
        return fd

    def clear(self) -> None:
        """A gateway of this number begins, and has nothing."""
        at = self._own * WORD
        self._memory[at : at + _ROW_WORDS * WORD] = bytes(_ROW_WORDS * WORD)

    def take_number(self) -> int:
        """How often this was called before, by all gateways."""
        return os.lseek(self._fd, 1, os.SEEK_CUR) - 1

    # -- this gateway's row ----------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        return bool(self._words[self._own + _SERVES])

    @serves.setter
    def serves(self, serves: bool) -> None:
        self._words[self._own + _SERVES] = serves

    def note_connections(self, num: int) -> None:
        self._words[self._own + _CONNECTIONS] = num

    def note_streams(self, num: int) -> None:
        self._words[self._own + _STREAMS] = num

    def note_poison(self, num: int) -> None:
        self._words[self._own + _POISON] = num

    def note_key(self, key: int, num_streams: int, num_places: int) -> None:
        self._words[self._own + _KEYS + key] = num_streams
        self._words[self._own + _KEYS + NUM_KEYS + key] = num_places

    def note_given(self, rank: int, incarnation: int, num_streams: int, num_requests: int) -> None:
        if 0 <= rank < NUM_RANKS:
            counts = min(num_requests, _MOST) << _COUNT_BITS | min(num_streams, _MOST)
            self._words[self._own + _RANKS + rank] = incarnation << 2 * _COUNT_BITS | counts

    def note_turn(self, turn: Turn | None) -> None:
        """What waits here for room."""
        at = (self._own + _TURN) * WORD
        fields = _TURN_FIELDS.pack(*turn, 1) if turn is not None else bytes(_TURN_FIELDS.size)
        self._memory[at : at + _TURN_FIELDS.size] = fields

    # -- streams that are kept, for clients that come back ---------------------------------------

    @property
    def num_kept(self) -> int:
        """How many each gateway can name."""
        return _NUM_KEPT

    def kept(self) -> dict[bytes, int]:
        """The slots of those that this gateway has named, or the one before it."""
        at = self._kept_at[self.number]
        names = _KEPT.iter_unpack(self._memory[at : at + _NUM_KEPT * _KEPT.size])
        return {digest: slot for slot, (digest, since_ns) in enumerate(names) if since_ns}

    def keep(self, slot: int, digest: bytes, since_ns: int) -> None:
        """The name before the time: one that is not whole does not count."""
        at = self._kept_at[self.number] + slot * _KEPT.size
        self._memory[at : at + len(digest)] = digest
        _KEPT.pack_into(self._memory, at, digest, since_ns)

    def drop(self, slot: int) -> None:
        at = self._kept_at[self.number] + slot * _KEPT.size
        self._memory[at : at + _KEPT.size] = bytes(_KEPT.size)

    def kept_since(self, slot: int) -> int:
        since_ns: int = _KEPT.unpack_from(self._memory, self._kept_at[self.number] + slot * _KEPT.size)[1]
        return since_ns

    def find_kept(self, digest: bytes) -> list[tuple[int, int]]:
        """Since when, and by which of the others."""
        found = []
        for number in self.numbers:
            begin = at = self._kept_at[number]
            end = begin + _NUM_KEPT * _KEPT.size
            while number != self.number and (at := self._map.find(digest, at, end)) >= 0:
                if (at - begin) % _KEPT.size == 0:
                    found.append((_KEPT.unpack_from(self._memory, at)[1], number))
                    break
                at += 1
        return found

    # -- what gateways have counted ----------------------------------------------------------------

    def save(self, counted: bytes) -> None:
        """The copy before stays valid until this one is whole."""
        if _COUNTED_HEAD.size + len(counted) > _COUNTED_BYTES:
            return
        self._num_saved += 1
        at = self._counted_at[self.number] + (self._num_saved & 1) * _COUNTED_BYTES
        begin = at + _COUNTED_HEAD.size
        self._memory[begin : begin + len(counted)] = counted
        _COUNTED_HEAD.pack_into(
            self._memory, at, self._num_saved, len(counted), _check(self._num_saved, memoryview(counted))
        )

    def saved(self, number: int) -> bytes | None:
        """The latest of this gateway, or of those before it."""
        return max(self._copies(number), default=(0, None))[1]

    def _copies(self, number: int) -> list[tuple[int, bytes]]:
        found = []
        for at in (self._counted_at[number], self._counted_at[number] + _COUNTED_BYTES):
            which, length, check = _COUNTED_HEAD.unpack_from(self._memory, at)
            begin = at + _COUNTED_HEAD.size
            if which and length <= _COUNTED_BYTES - _COUNTED_HEAD.size:
                counted = bytes(self._memory[begin : begin + length])
                if _check(which, memoryview(counted)) == check:
                    found.append((which, counted))
        return found

    # -- the others' rows ------------------------------------------------------------------------

    def given(self, rank: int, incarnation: int) -> tuple[int, int]:
        """Streams of the others at this worker, and of how many requests."""
        if not 0 <= rank < NUM_RANKS:
            return 0, 0
        words = [self._words[row + _RANKS + rank] for row in self._others]
        counts = [word for word in words if word >> 2 * _COUNT_BITS == incarnation]
        return sum(word & _MOST for word in counts), sum(word >> _COUNT_BITS & _MOST for word in counts)

    def streams_of(self, key: int) -> int:
        return sum(self._words[row + _KEYS + key] for row in self._others)

    def places_of(self, key: int) -> int:
        return sum(self._words[row + _KEYS + NUM_KEYS + key] for row in self._others)

    @property
    def num_poison(self) -> int:
        return sum(self._words[row + _POISON] for row in self._others)

    @property
    def num_streams(self) -> int:
        return sum(self._words[row + _STREAMS] for row in self._others)

    def turns(self) -> list[Turn]:
        """What waits for room at others that serve."""
        found = []
        for row in self._others:
            if self._words[row + _SERVES]:
                at = (row + _TURN) * WORD
                *turn, is_there = _TURN_FIELDS.unpack(self._memory[at : at + _TURN_FIELDS.size])
                if is_there:
                    found.append(Turn(*turn))
        return found

    def is_least_busy(self) -> bool:
        """Whether no other that serves has less to do: connections, and streams."""
        own = self._load(self._own)
        return all(own <= self._load(row) for row in self._others if self._words[row + _SERVES])

    def _load(self, row: int) -> int:
        return self._words[row + _CONNECTIONS] + self._words[row + _STREAMS]


def _kept_at(num_gateways: int, number: int) -> int:
    return _HEADER_BYTES + num_gateways * _ROW_WORDS * WORD + number * _NUM_KEPT * _KEPT.size


def _counted_at(num_gateways: int, number: int) -> int:
    return _kept_at(num_gateways, num_gateways) + number * 2 * _COUNTED_BYTES


def _num_bytes(num_gateways: int) -> int:
    return _counted_at(num_gateways, num_gateways)


def _check(number: int, counted: memoryview) -> int:
    return zlib.crc32(counted, number & 0xFFFFFFFF)
