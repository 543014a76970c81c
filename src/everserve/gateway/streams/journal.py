"""What a request's answer is made of, in the order in which it came: it is written down before anything is made of it.

A plain token takes four bytes. What has more to it is a note: the first token of a choice, the last one, one with
scores, one that was sampled under a mask; an error; and which worker a stream has. Everything that a client sees is a
function of the request, of how it began (http/recorded.py) and of these.
"""

from collections.abc import Iterator

import msgspec

from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.recorded import Birth
from everserve.ledger.ledger import Ledger
from everserve.ledger.pages import LedgerFull
from everserve.ledger.requests import USED, Request
from everserve.tables.outputs import Output

_MAX_TOKEN = 1 << 30


class Said(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """An output that is more than its token."""

    choice: int
    output: Output


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """The answer cannot be completed."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] | None = None

    def error(self) -> HttpError:
        return HttpError(self.status, self.message, param=self.param, code=self.code, headers=self.headers)


class Placed(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """A stream was given to a worker."""

    choice: int
    rank: int
    incarnation: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Birth | Said | Failed | Placed).decode
AnyEntry = Said | Failed | Placed


class Journal:
    """One request's. Without a ledger, or without room in it, nothing is written down; then its answer ends with this
    gateway."""

    def __init__(self, request: Request | None, ledger: Ledger | None) -> None:
        self.request = request
        self._ledger = ledger

    @classmethod
    def begin(cls, ledger: Ledger | None, birth: Birth, is_kept: bool) -> "Journal":
        if ledger is None:
            return cls(None, None)
        try:
            return cls(ledger.request(_encode(birth), is_kept), ledger)
        except LedgerFull:
            return cls(None, None)

    @property
    def reference(self) -> int:
        return self.request.reference if self.request is not None else 0

    @property
    def length(self) -> int:
        return self.request.length if self.request is not None else 0

    def say(self, choice: int, output: Output) -> None:
        """One more output of this choice."""
        request, token = self.request, output.token
        if request is None:
            return
        try:
            if (
                token is None
                or not output.index
                or output.finish_reason is not None
                or output.logprobs is not None
                or output.masked is not None
                or output.stop_id is not None
                or not 0 <= token < _MAX_TOKEN
            ):
                request.note(_encode(Said(choice, msgspec.structs.replace(output, id=""))))
            else:
                request.token(choice, token)
        except LedgerFull:
            self.close()

    def note(self, note: Failed | Placed) -> None:
        if self.request is not None:
            try:
                self.request.note(_encode(note))
            except LedgerFull:
                self.close()

    def fail(self, error: HttpError) -> None:
        self.note(Failed(error.status, str(error), error.param, error.code, error.headers))

    def entries(self) -> Iterator[tuple[int, AnyEntry]]:
        """Everything that was written down, each with the position behind it."""
        if self.request is None:
            return
        num_of: dict[int, int] = {}  # outputs of each choice
        for position, entry in self.request.entries():
            if isinstance(entry, tuple):
                choice, token = entry
                index = num_of[choice] = num_of.get(choice, -1) + 1
                yield position, Said(choice, Output(id="", index=index, token=token))
                continue
            note = _decode(entry)
            if isinstance(note, Said):
                num_of[note.choice] = note.output.index
            if not isinstance(note, Birth):
                yield position, note

    def tie_to_connection(self) -> None:
        """Its client cannot come back for it on another one any more."""
        if self.request is not None:
            self.request.state = USED

    def close(self) -> None:
        """It is not needed any more, or there is no room for all of it."""
        if self.request is not None and self._ledger is not None:
            self._ledger.close_request(self.request)
        self.request = None


def birth_of(request: Request) -> Birth | None:
    """How it began; None if that cannot be read."""
    try:
        _, first = next(request.entries())
        found = _decode(first) if isinstance(first, bytes) else None
    except (msgspec.MsgspecError, StopIteration):
        return None
    return found if isinstance(found, Birth) else None
