"""A stream of events that a reader takes from its source, for as long as both are there."""

from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from everserve.gateway.http import sse
from everserve.gateway.http.exchange import watch_disconnect


class Reader(Protocol):
    """One client of a source."""

    async def take(self) -> bytes | None:
        """What is new, as soon as there is something; None: this was all."""

    def end(self) -> None:
        """`take` returns None from now on."""


class ReaderStream(sse.EventStream):
    """The response: a reader is opened when it begins, and closed when it ends, however that comes about."""

    def __init__(self, open_reader: Callable[[], Reader], close_reader: Callable[[Any], None]) -> None:
        super().__init__()
        self._open_reader = open_reader
        self._close_reader = close_reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.start(send)
        reader = self._open_reader()
        try:
            with watch_disconnect(receive, reader.end):
                while scope["method"] != "HEAD" and (data := await reader.take()) is not None:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close_reader(reader)
