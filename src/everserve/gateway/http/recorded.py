"""A request that a gateway before this one had begun to answer, as the ledger has it.

It is read again from the bytes that its client sent, and handled as if it had just come; what was random or timed in
its answer is taken from here, and so are its tokens (streams/journal.py). So its answer is the same, byte for byte, and
goes on where it stopped.
"""

import asyncio

import msgspec

from everserve.ledger.requests import Request


class Birth(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """The first note of a journal: how the request began."""

    request_id: str
    created_s: int  # since 1970: what its answer says
    arrived_s: float
    seed: int
    unique: str  # a name that no other request has
    raw: bytes = b""  # as it came, if it outlives its connection


class Recorded:
    """One of them. `opened` is done when its streams exist again, or will not."""

    def __init__(self, request: Request, birth: Birth) -> None:
        self.request = request
        self.birth = birth
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)


class Position(msgspec.Struct, frozen=True):
    """How far an answer is written: so many events; and the length of the journal that they were made of, or 0 if they
    are not all that can be made of it."""

    num_events: int = 0
    journal: int = 0
