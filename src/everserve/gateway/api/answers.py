"""The response to one request that generates: a stream of events, or one JSON object at the end.

A client that sent an X-Request-Id with a streaming request may lose its connection and come back for the rest, by the
same id and `Last-Event-ID` (streams/resumable.py).
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from everserve.gateway.api.depends import gateway_of
from everserve.gateway.api.generation import Generation, Renderer
from everserve.gateway.gateway import Gateway
from everserve.gateway.http import sse
from everserve.gateway.http.access import Owner, audience
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.exchange import JsonPieces, check_json, held_by, watch_disconnect
from everserve.gateway.http.handing_over import hand_over
from everserve.gateway.http.recorded import Birth, Position, Recorded
from everserve.gateway.http.requests import ChatRequest, CompletionRequest
from everserve.gateway.http.transport import LedgerTransport
from everserve.gateway.streams.journal import Journal
from everserve.gateway.streams.outbox import KeptOutbox, Outbox
from everserve.gateway.streams.resumable import Kept, name_of
from everserve.gateway.text.prompts import Prompt

Follow = Callable[[LedgerTransport], None]  # all events so far are sent


class Answer(Protocol):
    """What a response writes to its client."""

    @property
    def outbox(self) -> Outbox: ...

    @property
    def journal(self) -> Journal: ...

    def open(self, arrived_s: float) -> None:
        """The client is there: begin, or go on. Raises if that is impossible."""
        ...

    def close(self) -> None:
        """The connection has ended, with the answer or before it."""
        ...


async def resume(http_request: Request) -> Response | None:
    """The rest of an answer, if that is what the client wants. What its body says does not matter."""
    gateway, state = gateway_of(http_request), http_request.state
    if state.has_own_id and "recorded" not in http_request.scope["state"]:
        await gateway.keeper.all_expected(state.request_id)  # also with a new request: the older one is to be known
    last_event_id = http_request.headers.get("last-event-id")
    if last_event_id is None:
        return None
    check_json(http_request)
    if not state.has_own_id:
        message = "Last-Event-ID resumes the stream that had the same X-Request-Id, but there is no X-Request-Id."
        raise HttpError(400, message, param="X-Request-Id")
    exchange = HttpExchange(http_request, is_return=True)
    if exchange.has_head and exchange.position.num_events:  # it had begun to get the rest from an earlier gateway
        last_event_id = str(exchange.position.num_events - 1)
    name = name_of(http_request)
    if not exchange.has_head and (number := gateway.kept_elsewhere(name)) is not None:
        return await hand_over(http_request, gateway, number)
    rest = gateway.keeper.find(name, last_event_id)
    return AnswerResponse(gateway, rest, state.owner, exchange)


def respond(
    http_request: Request,
    request: CompletionRequest | ChatRequest,
    renderer: Renderer,
    id: str,
    prompts: list[Prompt],
) -> Response:
    """The answer to a new request."""
    gateway = gateway_of(http_request)
    trace = gateway.tracing.request(http_request)
    state = http_request.state
    may_see, flow = audience(state.owner, state.has_own_id), gateway.flow(state.owner, request.priority or 0)
    held = held_by(http_request)
    is_kept = bool(request.stream) and gateway.keeper.is_on and _wants_event_ids(http_request)
    exchange, outbox = HttpExchange(http_request, is_kept=is_kept), KeptOutbox() if is_kept else Outbox()
    generation = Generation(gateway, request, renderer, id, may_see, flow, held, prompts, outbox, exchange, trace)
    if isinstance(outbox, KeptOutbox):
        outbox.again = generation.events_again
        kept = Kept(gateway.keeper, name_of(http_request), generation, outbox)
        return AnswerResponse(gateway, kept, state.owner, exchange)
    whole = None if request.stream else generation.whole
    return AnswerResponse(gateway, generation, state.owner, exchange, whole, generation.follow)


class HttpExchange:
    """One request of a client and its connection, if it came through one of ours."""

    def __init__(self, http_request: Request, is_kept: bool = False, is_return: bool = False) -> None:
        state = http_request.scope["state"]
        self.recorded: Recorded | None = state.get("recorded")
        self._connection = state.get("connection")
        self._request_id, self._created_s, self._unique = state["request_id"], state["created_s"], state["unique"]
        self.is_kept = is_kept
        self._is_return = is_return
        ledger = self._ledger
        self.position = ledger.position if ledger is not None else Position()
        self.has_head = ledger is not None and ledger.has_head
        if self.recorded is not None and is_kept and (ledger is None or ledger.is_loose):  # its client is away
            self.position = Position(*self.recorded.request.rendered)  # and may have got so much

    @property
    def _ledger(self) -> LedgerTransport | None:
        return self._connection.ledger if self._connection is not None else None

    def birth(self, seed: int, arrived_s: float) -> Birth:
        raw = self._connection.raw_request() if self.is_kept and self._connection is not None else b""
        return Birth(self._request_id, self._created_s, arrived_s, seed, self._unique, raw)

    def begin(self, reference: int) -> None:
        """The connection's commit names the record from now on."""
        if self._ledger is not None and reference:
            self._ledger.begin_request(reference, self._is_return)

    def cut(self) -> None:
        """The client has another connection now."""
        if self._ledger is not None:
            self._ledger.abort()

    def handle(self) -> None:
        if self._ledger is not None:
            self._ledger.handle()

    def mark(self, outbox: Outbox, journal: Journal) -> None:
        """What is written next is all that was taken so far."""
        position = Position(outbox.num_taken, 0 if outbox.has_pending else journal.length)
        if (self.is_kept or self._is_return) and journal.request is not None:
            most = journal.request.rendered
            journal.request.rendered = max(most, (position.num_events, position.journal))
        if self._ledger is not None:
            self._ledger.mark(position)

    def pour(self, outbox: Outbox, journal: Journal, follow: Follow) -> bool:
        """Writes what is ready, past the layers of the response, if its client reads. What comes then may be written in
        C."""
        ledger = self._ledger
        if ledger is None or not ledger.takes_chunks:
            return False
        chunk = outbox.take()
        self.mark(outbox, journal)
        ledger.write_chunk(chunk)
        follow(ledger)
        return True


def _wants_event_ids(http_request: Request) -> bool:
    """A client that names its request may come back for the rest, unless it says that it reads `data:` lines only:
    `Accept: text/event-stream;ids=no`. Most clients, OpenAI's among them, do not ask for event streams by name, so the
    lack of such a range says nothing."""
    accept = http_request.headers.get("accept", "").lower().replace(" ", "")
    ranges = [media_range.split(";") for media_range in accept.split(",")]
    refuses = any(name == "text/event-stream" and "ids=no" in parameters for name, *parameters in ranges)
    return http_request.state.has_own_id and not refuses


class AnswerResponse(sse.EventStream):
    """Writes an answer to one connection."""

    def __init__(
        self,
        gateway: Gateway,
        answer: Answer,
        owner: Owner,
        exchange: HttpExchange,
        whole: Callable[[], Awaitable[list[bytes]]] | None = None,
        follow: Follow = lambda ledger: None,
    ) -> None:
        super().__init__()
        self.owner = owner
        self._exchange = exchange
        self._gateway = gateway
        self._answer = answer
        self._follow = follow
        self._whole = whole  # None: as a stream

    @property
    def is_complete(self) -> bool:
        return self._answer.outbox.is_finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outbox = self._answer.outbox
        writer = asyncio.current_task()
        assert writer is not None
        self._gateway.answers.add(self)
        try:
            self._answer.open(arrived_s=scope["state"]["arrived_s"])
            self._exchange.begin(self._answer.journal.reference)
            outbox.attach(writer, self._exchange.cut)
            with watch_disconnect(receive, lambda: outbox.leave(writer)):
                if self._whole is None:
                    await self._stream(scope, send)
                elif await outbox.ready():
                    if outbox.error:
                        raise outbox.error
                    await JsonPieces(await self._whole())(scope, receive, send)
        finally:
            self._gateway.answers.discard(self)
            if outbox.detach(writer):
                self._answer.close()

    async def _stream(self, scope: Scope, send: Send) -> None:
        """The status line waits for the first event, so that a request that cannot run gets its true status."""
        outbox = self._answer.outbox
        if not outbox.has_begun:
            if not await outbox.ready():
                return
            if outbox.error:
                raise outbox.error
        await self.start(send)
        outbox.pour_by(partial(self._exchange.pour, outbox, self._answer.journal, self._follow))
        send_body: Send = scope["state"]["send_body"]
        is_last = False
        while not is_last and await outbox.ready():
            await outbox.encode_large(self._gateway.slices)
            body, is_last = outbox.take(), outbox.is_empty
            self._exchange.mark(outbox, self._answer.journal)
            await send_body({"type": "http.response.body", "body": body, "more_body": not is_last})
