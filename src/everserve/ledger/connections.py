"""One connection: what it has received (inbox), what it is to be sent (ring), and how far that is (commit)."""

import struct
import zlib
from typing import NamedTuple

from everserve.ledger.layout import C_COMMITS, C_COOKIE, C_INBOX, C_PREPARING, C_RING, C_SUSPICION, COMMIT_WORDS, WORD
from everserve.ledger.pages import BrokenChain, Chain, Pages

_FIELDS = struct.Struct("<7Q")
_CHECK = struct.Struct("<Q")
_COPY_BYTES = _FIELDS.size + _CHECK.size

# What is true of the answer at hand.
HAS_HEAD = 1  # its head is in the ring
IS_LAST = 2  # nothing more will be written: the connection is closed when all of it is sent
IS_LOOSE = 4  # there was no room for all of it here: no successor can go on with it
IS_RETURN = 8  # the request that it has the answer of is an earlier one's
IS_FEED = 16  # it has no end of its own, and may end behind any event: its client connects again
IS_GONE = 32  # the connection is on its way to another gateway ...
GONE_TO_AT = 8  # ... whose number is from this bit on; `num_rendered` is how much was received then


class Commit(NamedTuple):
    """What counts of a connection."""

    seq: int = 0
    ring_end: int = 0  # bytes up to here are to be sent
    num_rendered: int = 0  # events of the answer at hand that are among them
    journal: int = 0  # how much of the request's journal they were made of; 0: that is not known
    inbox_begin: int = 0  # where the request begins that has not been answered, or not wholly
    request: int = 0  # the record of that request: a reference
    flags: int = 0


class Connection:
    """Its slot. The position of a byte counts from the first one of the connection."""

    def __init__(self, pages: Pages, index: int, at: int) -> None:
        self.index = index
        self.inbox: Chain
        self.ring: Chain
        self.commit = Commit()
        self._pages = pages
        self.at = at
        self._word = at // WORD

    @property
    def cookie(self) -> int:
        return self._pages.words[self._word + C_COOKIE]

    @property
    def suspicion(self) -> int:
        """What the deaths of gateways in a row say against its request."""
        return self._pages.words[self._word + C_SUSPICION]

    @suspicion.setter
    def suspicion(self, num: int) -> None:
        self._pages.words[self._word + C_SUSPICION] = num

    @property
    def is_preparing(self) -> bool:
        """Its request has come, and nothing of it is recorded yet."""
        return bool(self._pages.words[self._word + C_PREPARING])

    @is_preparing.setter
    def is_preparing(self, is_preparing: bool) -> None:
        self._pages.words[self._word + C_PREPARING] = is_preparing

    def begin(self, cookie: int, received: int, sent: int) -> None:
        """A connection whose positions are these."""
        words, word = self._pages.words, self._word
        for i in range(WORD * 4):
            words[word + i] = 0
        self.inbox = Chain(self._pages, word + C_INBOX, received)
        self.ring = Chain(self._pages, word + C_RING, sent)
        self.commit = Commit()
        self.put(Commit(0, sent, 0, 0, received))
        words[word + C_COOKIE] = cookie  # last: now the slot is used

    def end(self) -> None:
        """It is closed, or about to be."""
        self.forget()
        self.inbox.clear()
        self.ring.clear()

    def forget(self) -> None:
        """The slot is free; what the chains are does not matter."""
        self._pages.words[self._word + C_COOKIE] = 0

    def put(self, commit: Commit) -> None:
        """From now on this counts, whatever its `seq`. A copy that was not written to its end is not valid."""
        seq = self.commit.seq + 1
        self.commit = commit = Commit(seq, *commit[1:])
        fields = _FIELDS.pack(*commit)
        at = self.at + (C_COMMITS + (seq & 1) * COMMIT_WORDS) * WORD
        self._pages.bytes[at : at + _COPY_BYTES] = fields + _CHECK.pack(_check(fields))

    def recover(self, taken: set[int]) -> None:
        """What a dead gateway has left. The kernel says where the inbox ends (`inbox.resume`). Raises BrokenChain."""
        copies = [copy for copy in map(self._copy, range(2)) if copy is not None]
        if not copies:
            raise BrokenChain("no commit is valid")
        self.commit = max(copies)
        self.inbox = Chain.left_at(self._pages, self._word + C_INBOX, taken)
        self.ring = Chain.left_at(self._pages, self._word + C_RING, taken)
        self.ring.resume(self.commit.ring_end)

    def _copy(self, which: int) -> Commit | None:
        at = self.at + (C_COMMITS + which * COMMIT_WORDS) * WORD
        copy = bytes(self._pages.bytes[at : at + _COPY_BYTES])
        fields, (check,) = copy[: _FIELDS.size], _CHECK.unpack(copy[_FIELDS.size :])
        commit = Commit._make(_FIELDS.unpack(fields))
        return commit if commit.seq and check == _check(fields) and commit.seq & 1 == which else None


def _check(fields: bytes) -> int:
    return zlib.crc32(fields) | 1 << 32
