"""One request to its end, over one connection or several."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from everserve.chaos.answers import Answer
from everserve.chaos.compare import Kind
from everserve.chaos.requests import Request
from everserve.chaos.target import Target
from everserve.client import Broken, Connection, Event
from everserve.errors import EverserveError

_LOOK_S = 0.1
_WHOLE_IS_LONGER = 4  # an answer in one piece has no events to wait for; it may take this many times the limit


class Trouble(EverserveError):
    """This request did not end as it should have."""

    def __init__(self, kind: Kind, what: str) -> None:
        super().__init__(what)
        self.kind = kind


@dataclass(frozen=True)
class Break:
    """Where a client breaks the connection, and how long it takes to come back."""

    after_events: int
    away_s: float = 0.0
    is_abrupt: bool = False


class Talk:
    """One request: what was received so far, and when."""

    def __init__(self, target: Target, request: Request, stall_limit_s: float, request_id: str | None = None) -> None:
        self.answer = Answer.empty(request.num_choices)
        self.first_s: float | None = None  # from sending the request to the first event
        self.gaps_s: list[float] = []  # between events on the same connection
        self.longest = (0.0, 0.0)  # of these gaps, and when it ended
        self.num_events = 0
        self.num_resumes = 0
        self.num_without_id = 0  # events
        self._target = target
        self.request = request
        self._stall_limit_s = stall_limit_s
        self._request_id = request_id
        self._last_id: int | None = None

    async def whole(self) -> None:
        """Asks for the answer in one piece."""
        limit_s = _WHOLE_IS_LONGER * self._stall_limit_s
        with _troubles(limit_s):
            async with asyncio.timeout(limit_s):
                connection = await self._open(self.request.body)
                try:
                    await _check_status(connection)
                    self._add(_parse(await connection.read_body()))
                finally:
                    connection.close()

    async def background(self) -> None:
        """Asks for a response, and then whether it has ended."""
        limit_s = _WHOLE_IS_LONGER * self._stall_limit_s
        with _troubles(limit_s):
            async with asyncio.timeout(limit_s):
                response = await self._body_of(await self._open(self.request.body))
                path = f"{self.request.path}/{response['id']}"
                while response["status"] in ("queued", "in_progress"):
                    await asyncio.sleep(_LOOK_S)
                    url, headers = self._target.url, dict(self._target.headers)
                    response = await self._body_of(await Connection.open(url, "GET", path, None, headers))
                try:
                    self.answer.add_response(response)
                except (LookupError, TypeError, AttributeError) as error:
                    raise Trouble(Kind.ERROR, f"no response ({error!r}): {str(response)[:200]}") from error

    async def _body_of(self, connection: Connection) -> dict[str, Any]:
        try:
            await _check_status(connection)
            return _parse(await connection.read_body())
        finally:
            connection.close()

    async def stream(self, breaks: Sequence[Break] = (), comes_back: bool = True) -> None:
        """Event by event. At each break the connection is given up, and then, maybe, taken up where it broke."""
        for at in breaks:
            if await self._stream_until(at.after_events, at.is_abrupt) or not comes_back:
                return
            await asyncio.sleep(at.away_s)
            self.num_resumes += 1
        await self._stream_until(None, is_abrupt=False)

    async def _stream_until(self, num_events: int | None, is_abrupt: bool) -> bool:
        """One connection: until so many events have arrived in all, or to the end. Returns whether that was the end."""
        is_over = False
        with _troubles(self._stall_limit_s):
            body = self.request.body | {"stream": True, "stream_options": {"include_usage": True}}
            async with asyncio.timeout(self._stall_limit_s) as limit:
                connection = await self._open(body)
                sent_s, before_s = time.perf_counter(), None
                try:
                    if num_events != 0:
                        await _check_status(connection)
                    while not is_over and (num_events is None or self.num_events < num_events):
                        if (event := await connection.read_event()) is None:
                            is_over = True
                            continue
                        self._on_event(event)
                        self._measure(event.at_s, before_s, sent_s)
                        before_s = event.at_s
                        limit.reschedule(asyncio.get_running_loop().time() + self._stall_limit_s)
                finally:
                    if is_abrupt:
                        connection.abort()
                    connection.close()
        return is_over

    async def _open(self, body: dict[str, Any]) -> Connection:
        headers = dict(self._target.headers)
        if self._request_id is not None:
            headers["X-Request-Id"] = self._request_id
        if self._last_id is not None:
            headers["Last-Event-ID"] = str(self._last_id)
        return await Connection.open(self._target.url, "POST", self.request.path, body, headers)

    def _on_event(self, event: Event) -> None:
        if "error" in event.data:
            raise Trouble(Kind.ERROR, f"an error event after {self.num_events} events: {event.data['error']}")
        self._check_id(event)
        self._add(event.data)
        self.num_events += 1

    def _measure(self, at_s: float, before_s: float | None, sent_s: float) -> None:
        """How long the client waited. The time that it was away does not count."""
        if before_s is not None:
            self.gaps_s.append(at_s - before_s)
            self.longest = max(self.longest, (at_s - before_s, at_s))
        elif self.num_resumes == 0:
            self.first_s = at_s - sent_s

    def _check_id(self, event: Event) -> None:
        """Ids count the events of a request, across its connections."""
        if event.id is None:
            self.num_without_id += 1
            return
        if not event.id.isdigit():
            raise Trouble(Kind.ERROR, f"an event's id is not a number: {event.id!r}")
        id, last = int(event.id), self._last_id
        if last is not None and id != last + 1:
            kind = Kind.GAP if id > last + 1 else Kind.DUPLICATE
            raise Trouble(kind, f"event {id} came after event {last}, connection {self.num_resumes + 1}")
        self._last_id = id

    def _add(self, data: dict[str, Any]) -> None:
        try:
            self.answer.add(data)
        except (LookupError, TypeError, AttributeError) as error:
            raise Trouble(Kind.ERROR, f"an answer that is none ({error!r}): {str(data)[:200]}") from error


async def _check_status(connection: Connection) -> None:
    if await connection.read_head() != 200:
        message = (await connection.read_body()).decode(errors="replace")
        raise Trouble(Kind.ERROR, f"HTTP {connection.status}: {message[:300]}")


def _parse(body: bytes) -> dict[str, Any]:
    data = json.loads(body)
    if not isinstance(data, dict):
        raise Trouble(Kind.ERROR, f"an answer that is none: {body[:200]!r}")
    return data


@contextmanager
def _troubles(limit_s: float) -> Iterator[None]:
    """Whatever goes wrong on a connection is the stream's trouble, not ours."""
    try:
        yield
    except TimeoutError:  # before OSError, which it is
        raise Trouble(Kind.HANG, f"nothing came for {limit_s:g} s") from None
    except (OSError, Broken) as error:
        raise Trouble(Kind.ERROR, f"the connection broke: {error}") from error
    except ValueError as error:
        raise Trouble(Kind.ERROR, f"not JSON: {error}") from error
