"""A request whose client may come back, between two gateways: what the next one believes that the client has."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request as HttpRequest

from everserve.gateway.api.answers import HttpExchange
from everserve.gateway.http.recorded import Birth, Position, Recorded
from everserve.gateway.streams.journal import Journal
from everserve.gateway.streams.outbox import KeptOutbox, Outbox
from everserve.ledger.ledger import Ledger
from everserve.ledger.requests import KEPT, USED
from tests.unit.gateway.test_transport import SHAPE, Connection

BIRTH = Birth("mine", 1, 2.0, 3, "unique", b"POST")


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def _exchange(connection: Connection | None, recorded: Recorded) -> HttpExchange:
    state = {"recorded": recorded, "request_id": "mine", "created_s": 1, "unique": "unique"}
    if connection is not None:
        state["connection"] = _Protocol(connection)
    return HttpExchange(HttpRequest({"type": "http", "state": state}), is_kept=True)


class _Protocol:
    def __init__(self, connection: Connection) -> None:
        self.ledger = connection.transport


def test_what_was_rendered_and_not_committed_is_written_again() -> None:
    """The gateway died with the head and some events in its own memory: a client that waits has none of them."""

    async def test() -> None:
        connection = Connection()
        journal = Journal.begin(connection.ledger, BIRTH, is_kept=True)
        assert journal.request is not None
        recorded = Recorded(journal.request, BIRTH)
        connection.transport.begin_request(journal.reference)
        outbox = KeptOutbox()
        outbox.put([b"data: a\n\n"])
        outbox.take()
        _exchange(connection, recorded).mark(outbox, journal)
        connection.die()
        assert _exchange(connection, recorded).position == Position()
        assert _exchange(None, recorded).position.num_events == 1  # a client that has left may have it

    run(test)


def test_a_request_is_kept_from_its_first_note_on() -> None:
    """Else it could not be resumed at a gateway after one that died in between."""
    ledger = Ledger.map(Ledger.create(SHAPE))
    ledger.open()
    journal = Journal.begin(ledger, BIRTH, is_kept=True)
    assert journal.request is not None
    assert journal.request.state == KEPT
    journal.tie_to_connection()
    assert journal.request.state == USED


def test_the_older_of_two_connections_ends_at_once() -> None:
    """Before the newer one gets anything: a next gateway must not find both, and go on with both."""

    async def write() -> None:
        await asyncio.sleep(60)

    async def test() -> None:
        outbox, cut = Outbox(), []
        older, newer = asyncio.ensure_future(write()), asyncio.ensure_future(write())
        outbox.attach(older, lambda: cut.append("older"))
        outbox.attach(newer, lambda: cut.append("newer"))
        assert cut == ["older"]
        await asyncio.wait([older])
        assert older.cancelled()
        newer.cancel()

    run(test)
