"""Responses that no connection waits for: those that a client wants in the background, and those whose process died.

A run is a request of our own to the same endpoint (api/unattended.py), with the seed that was written down with the
response. Its events are the same whenever and wherever it runs, so a client that has read some of them in an earlier
life of the run goes on behind them. The row in the store says what is to be run; what has ended is in the row only.
"""

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from everserve.errors import EverserveError, OverloadedError
from everserve.gateway.api.responses.view import ResponseFailure, ResponseView
from everserve.gateway.api.responses.writer import snapshot
from everserve.gateway.api.unattended import Unattended, call
from everserve.gateway.gateway import Gateway
from everserve.gateway.http import sse
from everserve.gateway.http.access import batch_owner
from everserve.gateway.http.exchange import watch_disconnect
from everserve.gateway.store import responses
from everserve.gateway.store.responses import BACKGROUND, StoredResponse
from everserve.gateway.store.store import Store

_RETRY_S = 0.5
_AT_ONCE = 256
_POLL_S = 0.25  # of a response that another process of this instance runs
ENDED = ("completed", "incomplete", "failed", "cancelled")
log = logging.getLogger(__name__)


class Run:
    """One response, while this process runs it."""

    def __init__(self, stored: StoredResponse) -> None:
        self.stored = stored
        self.events: list[bytes] = []  # each as it is sent; its number is its place
        self.has_ended = False
        self.task: asyncio.Task[None] | None = None
        self.rest = b""  # of an event that has not come completely
        self._grown = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        return bool(self.events)

    def on_body(self, body: bytes) -> None:
        *events, self.rest = (self.rest + body).split(b"\n\n")
        if events:
            self.events += (event + b"\n\n" for event in events)
            self._wake()

    def restart(self) -> None:
        self.events, self.rest = [], b""

    def end(self) -> None:
        self.has_ended = True
        self._wake()

    async def read(self, after: int) -> AsyncIterator[bytes]:
        """The events behind this one, as they come."""
        at = after + 1
        while True:
            ready = self.events[at:]
            if ready:
                at += len(ready)
                yield b"".join(ready)
            elif self.has_ended:
                return
            else:
                self._grown.clear()
                await self._grown.wait()

    def _wake(self) -> None:
        self._grown.set()


class BackgroundResponses:
    """All that this process runs."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._runs: dict[str, Run] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)
        self.attended: set[str] = set()  # responses that connections of this process wait for

    async def take_up(self, store: Store) -> None:
        """What processes that have died have left."""
        for stored in await store.database.run(responses.running):
            if stored.id not in self._runs and stored.id not in self.attended:
                self.start(stored)

    def check_room(self, identity: str) -> None:
        """Raise unless this key may have one more."""
        num_runs, most = (
            sum(run.stored.owner == identity for run in self._runs.values()),
            self._gateway.config.max_queue,
        )
        if num_runs >= most:
            raise OverloadedError(f"{num_runs} responses run in the background already; at most {most} may.")

    def start(self, stored: StoredResponse) -> None:
        run = self._runs[stored.id] = Run(stored)
        run.task = asyncio.create_task(self._run(run))

    def find(self, id: str) -> Run | None:
        return self._runs.get(id)

    def cancel(self, id: str) -> None:
        """A client does not want it any more; the store knows already."""
        run = self._runs.get(id)
        if run is not None and run.task is not None:
            run.task.cancel()

    def close(self) -> None:
        """The process ends. What has not ended stays in the store, to be taken up again."""
        for run in list(self._runs.values()):
            if run.task is not None:
                run.task.cancel()

    async def _run(self, run: Run) -> None:
        stored = run.stored
        try:
            async with self._places:
                while not await self._try(run):
                    run.restart()  # no client has seen an event of it: it was refused
                    await asyncio.sleep(_RETRY_S)
        finally:
            run.end()
            del self._runs[stored.id]

    async def _try(self, run: Run) -> bool:
        """False: there is no room at the moment."""
        stored = run.stored
        access = self._gateway.access
        owner = access.owner_of(stored.owner)
        is_asked_for = stored.runs == BACKGROUND
        who = Unattended(
            owner=owner if is_asked_for else batch_owner(owner),
            identity=stored.owner,
            request_id=stored.id,
            created=stored.created,
            response_id=stored.id,
        )
        status = await call(self._app, "/v1/responses", stored.request, who, run.on_body)
        if status == 503 or self._gateway.is_draining:
            return False
        view = _last_view(run) if status == 200 else _refused(stored, b"".join(run.events) + run.rest)
        if view is None:
            view = _refused(stored, b"")
        await self._end(run, view)
        return True

    async def _end(self, run: Run, view: bytes) -> None:
        store = self._gateway.store
        assert store is not None, "it came from there"
        kept = zlib.compress(b"".join(run.events), 1)
        while True:
            try:
                await store.database.run(lambda db: responses.end(db, run.stored.id, view, kept))
                return
            except EverserveError as error:
                log.warning("a response waits to be stored: %s", error)
                await asyncio.sleep(_RETRY_S)


class _Last(msgspec.Struct):
    type: str
    response: msgspec.Raw = msgspec.Raw(b"")


def _last_view(run: Run) -> bytes | None:
    """What the last event says of the whole response. None: it was cut off."""
    if not run.events:
        return None
    _, _, data = run.events[-1].partition(b"\ndata: ")
    last = msgspec.json.decode(data, type=_Last)
    ends = tuple(f"response.{status}" for status in ENDED)
    return bytes(last.response) if last.type in ends else None


def _refused(stored: StoredResponse, body: bytes) -> bytes:
    """It cannot run at all any more."""
    view = msgspec.json.decode(stored.view, type=ResponseView)
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = "This response could not be run."
    view.status, view.error = "failed", ResponseFailure(message=message)
    return snapshot(view)


class EventsOfRun(sse.EventStream):
    """The events of a response behind one of them, as they come."""

    def __init__(self, runs: BackgroundResponses, store: Store, stored: StoredResponse, after: int) -> None:
        super().__init__()
        self._runs = runs
        self._store = store
        self._stored = stored
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.current_task()
        assert writer is not None
        has_left = False

        def leave() -> None:
            nonlocal has_left
            has_left = True
            writer.cancel()

        await self.start(send)
        try:
            with watch_disconnect(receive, leave):
                async for body in self._read():
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except asyncio.CancelledError:
            if not has_left:
                raise
            writer.uncancel()
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read(self) -> AsyncIterator[bytes]:
        stored, after = self._stored, self._after
        while True:
            run = self._runs.find(stored.id)
            if run is not None:
                async for body in run.read(after):
                    after += body.count(b"\n\n")
                    yield body
            found = await self._store.database.run(lambda db: responses.find(db, stored.owner, stored.id))
            if found is None:
                return
            if not found.runs:
                yield b"".join(split_events(found.events)[after + 1 :])
                return
            await asyncio.sleep(_POLL_S)


def split_events(kept: bytes | None) -> list[bytes]:
    """The events as they were kept."""
    events = zlib.decompress(kept).split(b"\n\n")[:-1] if kept else []
    return [event + b"\n\n" for event in events]
