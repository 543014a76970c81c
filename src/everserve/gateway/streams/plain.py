"""Streams whose events are written in C (ledger/writer.py): one choice, whose next events are its tokens' texts and
nothing else, to a client that reads.

    written by Python --an event was sent, all of it--> plain --another kind of output, a full page, half of an event
            ^------------------------------------------------ sent, or anything else happens to it--'

While a stream is plain, what Python knows of its text, its journal and its connection stays behind. So everything that
asks for these, or changes them, calls `leave` first: a worker's table of streams, and the connection.
"""

from collections.abc import Callable

from everserve.gateway.http.transport import LedgerTransport
from everserve.gateway.streams.choices import Choice
from everserve.gateway.streams.journal import Journal
from everserve.gateway.streams.outbox import Outbox
from everserve.gateway.text.detokenizer import ByteLevelDetokenizer
from everserve.ledger import writer
from everserve.ledger.connections import Connection
from everserve.ledger.requests import Request

Around = tuple[bytes, bytes]  # an event, before and after its text


class PlainStream:
    """One of them."""

    __slots__ = (
        *("_around", "_choice", "_count", "_outbox", "_plain", "_record", "_request", "_transport", "address", "text"),
    )

    def __init__(
        self,
        choice: Choice,
        text: ByteLevelDetokenizer,
        outbox: Outbox,
        transport: LedgerTransport,
        around: Around,
        count: Callable[[int], None],
        record: Connection,
        request: Request,
        plain: writer.Plain,
    ) -> None:
        """`count` is told at the end how many tokens were written here."""
        self._record, self._request = record, request
        self._choice = choice
        self.text = text
        self._outbox = outbox
        self._transport = transport
        self._around = around  # C has only their addresses
        self._count = count
        self._plain = plain
        self.address = writer.address_of_plain(plain)

    @classmethod
    def begin(
        cls,
        choice: Choice,
        outbox: Outbox,
        journal: Journal,
        transport: LedgerTransport,
        around: Around,
        count: Callable[[int], None],
    ) -> bool:
        """From now on the stream is plain, if it can be."""
        stream, text, request, record = choice.stream, choice.bare_detokenizer, journal.request, transport.bare_record
        if text is None or request is None or record is None or not choice.is_under_way or outbox.has_pending:
            return False
        if not request.is_at(choice.index):
            return False
        ledger = transport.ledger
        plain = writer.follow(ledger, record, request, transport.fileno(), text.spellings, around, text.pending)
        if plain is None:
            return False
        stream.plain = cls(choice, text, outbox, transport, around, count, record, request, plain)
        transport.end_plain = stream.leave_plain
        return True

    def leave(self) -> None:
        """Python writes again."""
        transport, plain, choice = self._transport, self._plain, self._choice
        transport.end_plain = None
        num, num_unsent = plain.num_written, writer.take_back(plain, self._record, self._request)
        self._outbox.num_taken += num
        choice.went_on(num, plain.num_characters)
        self.text.pending = writer.pending_of(plain)
        self._count(num)
        transport.went_on(num_unsent)

    def hand_back(self, token: int, last_s: float) -> None:
        """Python writes this token, which came after one at this time. Next time C knows how it is spelled."""
        self._choice.last_s = last_s
        self.text.learn(token)
