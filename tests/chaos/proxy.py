"""A proxy between the checker and a real server, which does to answers what a bad server would do."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from everserve.client import Connection, Event
from tests.support.chaos_toy import DONE, Asked, event, head, json_answer

Events = AsyncIterator[Event]
Flaw = Callable[[Events], AsyncIterator[bytes]]  # what the client gets instead of these events and their end


class Proxy:
    """Passes everything on. From the `after`-th completion on, streams that the flaw is for get it: one, or each."""

    def __init__(
        self,
        upstream: str,
        after: int,
        flaw: Flaw | None = None,
        is_for: Callable[[Asked], bool] = lambda asked: True,
        once: bool = False,
        headers: tuple[str, ...] = ("x-request-id", "last-event-id"),
        change_json: Callable[[str, Any], Any] = lambda path, data: data,
    ) -> None:
        self._upstream = upstream
        self._after = after
        self._flaw = flaw
        self._is_for = is_for
        self._once = once
        self._headers = headers  # that are passed on
        self._change_json = change_json
        self._num_completions = 0
        self.num_flawed = 0

    @property
    def is_armed(self) -> bool:
        return self._num_completions > self._after

    async def __call__(self, asked: Asked) -> AsyncIterator[bytes]:
        self._num_completions += asked.path == "/v1/completions"
        kept = {name: asked.headers[name] for name in self._headers if name in asked.headers}
        connection = await Connection.open(self._upstream, asked.method, asked.path, asked.body, kept)
        try:
            status = await connection.read_head()
            if "event-stream" in connection.headers.get("content-type", ""):
                async for part in self._stream(connection, asked):
                    yield part
                return
            body = await connection.read_body()
            if "json" in connection.headers.get("content-type", ""):
                data = json.loads(body)
                yield json_answer(self._change_json(asked.path, data) if self.is_armed else data, status)
            else:
                yield head(status, "text/plain") + body
        finally:
            connection.close()

    async def _stream(self, connection: Connection, asked: Asked) -> AsyncIterator[bytes]:
        is_flawed = self._flaw is not None and self.is_armed and self._is_for(asked)
        if not is_flawed or (self._once and self.num_flawed):
            flaw: Flaw = passed_on
        else:
            assert self._flaw is not None
            flaw = self._flaw
            self.num_flawed += 1
        yield head()
        is_over = False
        try:
            async for part in flaw(events_of(connection)):
                yield part
            is_over = True
        finally:
            if flaw is self._flaw and not is_over:
                self.num_flawed -= 1  # the client has left; it may not have seen it


async def events_of(connection: Connection) -> Events:
    while (one := await connection.read_event()) is not None:
        yield one


def encode(one: Event) -> bytes:
    return event(one.data, int(one.id) if one.id is not None else None)


async def passed_on(events: Events) -> AsyncIterator[bytes]:
    async for one in events:
        yield encode(one)
    yield DONE
