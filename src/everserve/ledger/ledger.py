"""Ledger: one ledger, mapped, and what one gateway leaves to the next.

A descriptor of the memory is enough to go on with it. One process uses it at a time: a gateway that has died is reaped
before the next one reads what it has left.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field

from everserve.ledger.connections import Connection
from everserve.ledger.layout import (
    CONNECTION_BYTES,
    H_COUNTERS,
    H_CRASHED,
    H_FOLLOWER,
    H_GENERATION,
    H_GIVEN,
    H_HANDLING,
    H_LOST,
    H_MAGIC,
    H_PULSE,
    H_READY,
    MAGIC,
    NUM_COUNTERS,
    NUM_RANKS,
    REQUEST_BYTES,
    VERSION,
    WORD,
    Shape,
)
from everserve.ledger.pages import BrokenChain, LedgerFull, Pages
from everserve.ledger.requests import KEPT, USED, Request

_SHAPE = struct.Struct("<5Q")  # the first words of the header


class NotALedger(ValueError):
    """The memory holds something else, or a ledger of another version."""


@dataclass
class Left:
    """What a dead gateway has left."""

    connections: dict[int, Connection] = field(default_factory=dict)  # by cookie
    requests: dict[int, Request] = field(default_factory=dict)  # by reference
    num_broken: int = 0  # of both, which cannot be read

    def pages(self) -> Iterator[int]:
        """All that are in use."""
        for connection in self.connections.values():
            yield from connection.inbox.pages
            yield from connection.ring.pages
        for request in self.requests.values():
            yield from request.pages


class Ledger:
    """One gateway's. Zeroed memory of the right size becomes an empty one."""

    def __init__(self, memory: memoryview, shape: Shape) -> None:
        self.memory = memory
        self._words = self.memory.cast("Q")
        self.shape = shape
        self.left = Left()
        self.left_handling = 0  # what the gateway before was busy with
        self._pages = Pages(self.memory, shape.pages_at, shape.num_pages)
        self._free_connections: list[int] = []
        self._free_requests: list[int] = []

    @classmethod
    def create(cls, shape: Shape) -> int:
        """A descriptor of the memory of a new one."""
        fd = os.memfd_create("ledger", os.MFD_CLOEXEC)
        os.ftruncate(fd, shape.num_bytes)
        os.pwrite(fd, _SHAPE.pack(MAGIC, VERSION, *astuple(shape)), H_MAGIC * WORD)
        return fd

    @classmethod
    def map(cls, fd: int) -> "Ledger":
        """The descriptor stays the caller's, and may be closed. Raises NotALedger."""
        said = os.pread(fd, _SHAPE.size, H_MAGIC * WORD)
        if len(said) < _SHAPE.size or said[: 2 * WORD] != _SHAPE.pack(MAGIC, VERSION, 0, 0, 0)[: 2 * WORD]:
            raise NotALedger
        num_connections, num_requests, num_pages = _SHAPE.unpack(said)[2:]
        shape = Shape(num_connections=num_connections, num_requests=num_requests, num_pages=num_pages)
        if os.fstat(fd).st_size < shape.num_bytes:
            raise NotALedger
        return cls(memoryview(mmap.mmap(fd, shape.num_bytes)), shape)

    def open(self) -> Left:
        """Begin to write: what the gateway before has left is `left`, and everything else is free."""
        self.left_handling = self.handling
        self._words[H_GENERATION] += 1
        self._words[H_HANDLING] = 0
        self.beat()
        self.left, taken = Left(), set[int]()
        shape = self.shape
        for index in self._used(shape.connections_at, CONNECTION_BYTES, shape.num_connections):
            connection = self._connection(index)
            if self._recovers(connection, taken):
                self.left.connections[connection.cookie] = connection
        for index in self._used(shape.requests_at, REQUEST_BYTES, shape.num_requests):
            request = self._request(index)
            if self._recovers(request, taken):
                self.left.requests[request.reference] = request
        used = {connection.index for connection in self.left.connections.values()}
        self._free_connections = [index for index in reversed(range(shape.num_connections)) if index not in used]
        used = {request.index for request in self.left.requests.values()}
        self._free_requests = [index for index in reversed(range(shape.num_requests)) if index not in used]
        self._pages.keep(set(self.left.pages()))
        return self.left

    def _used(self, at: int, size: int, num: int) -> list[int]:
        """The slots whose first word is not 0."""
        first = self._words[at // WORD : (at + num * size) // WORD : size // WORD]
        return [index for index, word in enumerate(first.tolist()) if word]

    @property
    def generation(self) -> int:
        """The generation of the gateway that writes: 1, 2, ..."""
        return self._words[H_GENERATION]

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    # -- signs of life ---------------------------------------------------------------------------

    def beat(self) -> None:
        """The gateway's loop runs."""
        self._words[H_PULSE] = time.monotonic_ns()

    @property
    def pulse_age_s(self) -> float:
        """How long ago its loop ran."""
        return (time.monotonic_ns() - self._words[H_PULSE]) / 1e9

    @property
    def has_served(self) -> bool:
        """Whether this generation got so far."""
        return self._words[H_READY] == self._words[H_GENERATION]

    def note_ready(self) -> None:
        self._words[H_READY] = self._words[H_GENERATION]

    @property
    def has_crashed(self) -> bool:
        """Whether the gateway before ended by its own fault, and was not killed from outside."""
        return bool(self._words[H_CRASHED])

    @has_crashed.setter
    def has_crashed(self, has_crashed: bool) -> None:
        self._words[H_CRASHED] = has_crashed

    @property
    def num_given(self) -> int:
        """How often a gateway has given its connections to the next keeper."""
        return self._words[H_GIVEN]

    def note_given(self) -> None:
        """From now on they are the next keeper's, whatever becomes of this process."""
        self._words[H_GIVEN] += 1

    def note_follower(self) -> None:
        """They are this process's now."""
        self._words[H_FOLLOWER] = os.getpid()

    @staticmethod
    def follower(fd: int) -> int:
        """The keeper that has got all connections last; 0 if there was only one."""
        return int.from_bytes(os.pread(fd, WORD, H_FOLLOWER * WORD), "little")

    @property
    def handling(self) -> int:
        """The connection whose request the gateway is busy with at this instruction: its index + 1, or 0."""
        return self._words[H_HANDLING]

    @handling.setter
    def handling(self, reference: int) -> None:
        self._words[H_HANDLING] = reference

    # -- connections and requests ----------------------------------------------------------------

    def connection(self, cookie: int, received: int = 0, sent: int = 0) -> Connection:
        """A slot for a connection. Raises LedgerFull."""
        if not self._free_connections:
            raise LedgerFull
        connection = self._connection(self._free_connections.pop())
        connection.begin(cookie, received, sent)
        return connection

    def close_connection(self, connection: Connection) -> None:
        connection.end()
        self._free_connections.append(connection.index)

    def request(self, first: bytes, is_kept: bool = False) -> Request:
        """A slot for a request, with the note that says how it began. Raises LedgerFull."""
        if not self._free_requests:
            raise LedgerFull
        request = self._request(self._free_requests[-1])
        request.begin(first, KEPT if is_kept else USED)
        self._free_requests.pop()
        return request

    def close_request(self, request: Request) -> None:
        request.end()
        self._free_requests.append(request.index)

    # -- numbers that go on over all generations -------------------------------------------------

    def counter(self, which: int) -> int:
        assert 0 <= which < NUM_COUNTERS
        return self._words[H_COUNTERS + which]

    def set_counters(self, first: int, values: Iterable[int]) -> None:
        for which, value in enumerate(values, start=first):
            self._words[H_COUNTERS + which] = value

    def note_lost(self, rank: int, incarnation: int) -> None:
        """The latest process of this rank that was declared gone."""
        if 0 <= rank < NUM_RANKS:
            self._words[H_LOST + rank] = incarnation

    def lost(self) -> dict[int, int]:
        found = self._words[H_LOST : H_LOST + NUM_RANKS].tolist()
        return {rank: incarnation for rank, incarnation in enumerate(found) if incarnation}

    def count(self, which: int) -> int:
        """One more; returns how many there were before."""
        before = self._words[H_COUNTERS + which]
        self._words[H_COUNTERS + which] = before + 1
        return before

    def _connection(self, index: int) -> Connection:
        return Connection(self._pages, index, self.shape.connections_at + index * CONNECTION_BYTES)

    def _request(self, index: int) -> Request:
        return Request(self._pages, index, self.shape.requests_at + index * REQUEST_BYTES)

    def _recovers(self, what: Connection | Request, taken: set[int]) -> bool:
        try:
            what.recover(taken)
        except BrokenChain:
            self.left.num_broken += 1
            what.forget()
            return False
        return True
