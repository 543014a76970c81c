"""The response to one request that generates: a stream of events, or one JSON object at the end.

A client that sent an X-Request-Id with a streaming request may lose its connection and come back for the rest, by the
same id and `Last-Event-ID` (streams/resumable.py).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from everserve.gateway.api.depends import gateway_of
from everserve.gateway.api.generation import Generation, Renderer
from everserve.gateway.gateway import Gateway
from everserve.gateway.http import sse
from everserve.gateway.http.access import audience
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.exchange import JsonPieces, check_json, watch_disconnect
from everserve.gateway.http.requests import ChatRequest, CompletionRequest
from everserve.gateway.streams.outbox import KeptOutbox, Outbox
from everserve.gateway.streams.resumable import Kept, name_of
from everserve.gateway.text.prompts import Prompt


class Answer(Protocol):
    """What a response writes to its client."""

    @property
    def outbox(self) -> Outbox: ...

    def open(self, arrived_s: float) -> None:
        """The client is there: begin, or go on. Raises if that is impossible."""
        ...

    def close(self) -> None:
        """The connection has ended, with the answer or before it."""
        ...


def resume(http_request: Request) -> Response | None:
    """The rest of an answer, if that is what the client wants. What its body says does not matter."""
    last_event_id = http_request.headers.get("last-event-id")
    if last_event_id is None:
        return None
    check_json(http_request)
    if not http_request.state.has_own_id:
        message = "Last-Event-ID resumes the stream that had the same X-Request-Id, but there is no X-Request-Id."
        raise HttpError(400, message, param="X-Request-Id")
    gateway = gateway_of(http_request)
    return AnswerResponse(gateway, gateway.keeper.find(name_of(http_request), last_event_id))


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
    may_see = audience(state.owner, state.has_own_id)
    if request.stream and gateway.keeper.is_on and _wants_event_ids(http_request):
        outbox = KeptOutbox()
        generation = Generation(gateway, request, renderer, id, may_see, prompts, outbox, trace)
        return AnswerResponse(gateway, Kept(gateway.keeper, name_of(http_request), generation, outbox))
    generation = Generation(gateway, request, renderer, id, may_see, prompts, Outbox(), trace)
    return AnswerResponse(gateway, generation, None if request.stream else generation.whole)


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
        self, gateway: Gateway, answer: Answer, whole: Callable[[], Awaitable[list[bytes]]] | None = None
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._answer = answer
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
            outbox.attach(writer)
            with watch_disconnect(receive, lambda: outbox.leave(writer)):
                if self._whole is None:
                    await self._stream(send, send_body=scope["state"]["send_body"])
                elif await outbox.ready():
                    if outbox.error:
                        raise outbox.error
                    await JsonPieces(await self._whole())(scope, receive, send)
        finally:
            self._gateway.answers.discard(self)
            if outbox.detach(writer):
                self._answer.close()

    async def _stream(self, send: Send, send_body: Send) -> None:
        """The status line waits for the first event, so that a request that cannot run gets its true status."""
        outbox = self._answer.outbox
        if not outbox.has_begun:
            if not await outbox.ready():
                return
            if outbox.error:
                raise outbox.error
        await self.start(send)
        is_last = False
        while not is_last and await outbox.ready():
            await outbox.encode_large(self._gateway.slices)
            body, is_last = outbox.take(), outbox.is_empty
            await send_body({"type": "http.response.body", "body": body, "more_body": not is_last})
