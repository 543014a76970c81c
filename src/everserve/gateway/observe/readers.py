"""A stream of events that a reader takes from its source, for as long as both are there."""

from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from everserve.gateway.http import sse
from everserve.gateway.http.exchange import watch_disconnect
from everserve.gateway.http.turns import Turns


class Reader(Protocol):
    """One client of a source."""

    async def wait(self) -> None:
        """Until there is something new."""

    async def take(self) -> bytes | None:
        """What is new; None: this was all."""

    def end(self) -> None:
        """`take` returns None from now on."""


class ReaderStream(sse.EventStream):
    """The response: a reader is opened when it begins, and closed when it ends, however that comes about. All readers
    wait for the same news: they take turns."""

    def __init__(self, turns: Turns, open_reader: Callable[[], Reader], close_reader: Callable[[Any], None]) -> None:
        super().__init__()
        self._turns = turns
        self._open_reader = open_reader
        self._close_reader = close_reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope["state"].get("connection")
        if connection is not None and connection.ledger is not None:
            connection.ledger.begin_feed()
        await self.start(send)
        reader = self._open_reader()
        try:
            with watch_disconnect(receive, reader.end):
                while scope["method"] != "HEAD":
                    await reader.wait()
                    await self._turns.wait()
                    if (data := await reader.take()) is None:
                        break
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close_reader(reader)
