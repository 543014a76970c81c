"""What HTTP needs here beyond Starlette: request ids, JSON bodies within limits, noticing that the client has left."""

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everserve.errors import RequestError
from everserve.gateway.http.bodies import LIGHT_BODY_BYTES, LIGHT_BODY_WEIGHT, MAX_BODY_WEIGHT, Weight, exact_weight
from everserve.gateway.http.errors import HttpError, explain_bad_json
from everserve.gateway.http.requests import UNSUPPORTED
from everserve.gateway.http.slices import Slices

MAX_BODY_BYTES = 32 << 20
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_encode = msgspec.json.Encoder().encode
_T = TypeVar("_T")


class RequestIds:
    """Middleware: every request has an id, the client's if it sent one, and every response says which.

    Leaves in `request.state`: `request_id`, and whether it is the client's own; `arrived_s`; and `send_body`, which
    skips the layers of middleware between here and the route. They care only about how a response starts, and a
    stream's body is sent token by token.

    And counts responses by route, method and kind of status, as vLLM's servers do: unknown paths count as one route.
    """

    def __init__(self, app: ASGIApp, responses: "Counter[tuple[str, str, str]]") -> None:
        self._app = app
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
        is_valid = given is None or _REQUEST_ID.fullmatch(given) is not None
        request_id = given.decode("ascii") if given is not None and is_valid else uuid.uuid4().hex

        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._count(scope, message["status"])
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        scope.setdefault("state", {}).update(
            request_id=request_id, has_own_id=given is not None, arrived_s=time.monotonic(), send_body=send
        )
        app: ASGIApp = self._app if is_valid else _bad_request_id()
        try:
            await app(scope, receive, send_with_id)
        except Exception:  # our own bug, answered further out (app.py)
            if not has_started:
                self._count(scope, 500)
            raise

    def _count(self, scope: Scope, status: int) -> None:
        handler = getattr(scope.get("route"), "path", "none")
        self._responses[handler, scope["method"], f"{status // 100}xx"] += 1


class JsonResponse(Response):
    """A msgspec struct, or anything else that msgspec can encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _encode(content)


class JsonPieces(Response):
    """A JSON object that was written in pieces."""

    media_type = "application/json"

    def __init__(self, pieces: list[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"content-length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in filter(None, self._pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # the kernel may take megabytes at once
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def check_json(request: Request) -> None:
    """Raise unless the body says that it is JSON, which a browser does not send for a page of another origin."""
    content_type = request.headers.get("content-type", "").partition(";")[0]
    if content_type.strip().lower() != "application/json":
        raise RequestError("The request must have 'Content-Type: application/json'.")


async def read_json(request: Request, decoder: "msgspec.json.Decoder[_T]") -> _T:
    """The body as the struct that the decoder makes, or a RequestError that says what is wrong with it."""
    check_json(request)
    body, weight = await _read_body(request)
    slices: Slices = request.app.state.gateway.slices
    if weight.at_most > MAX_BODY_WEIGHT and (await slices.run(exact_weight(body)))[-1] > MAX_BODY_WEIGHT:
        raise RequestError("The request body has too many values to be decoded at once. Please send less at a time.")
    try:
        if weight.at_most <= LIGHT_BODY_WEIGHT and len(body) <= LIGHT_BODY_BYTES:
            return decoder.decode(body)
        return await slices.call(lambda: decoder.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise explain_bad_json(error, UNSUPPORTED) from error


@contextmanager
def watch_disconnect(receive: Receive, on_disconnect: Callable[[], None]) -> Iterator[None]:
    """Call back if the client leaves; the body must have been read before."""

    async def until_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def on_done(done: "asyncio.Future[None]") -> None:
        if not done.cancelled():
            on_disconnect()

    task = asyncio.ensure_future(until_disconnect())
    task.add_done_callback(on_done)
    try:
        yield
    finally:
        task.cancel()


async def _read_body(request: Request) -> tuple[bytearray, Weight]:
    length = request.headers.get("content-length", "0")
    is_too_large = not length.isdigit() or int(length) > MAX_BODY_BYTES
    body, weight = bytearray(), Weight()
    if not is_too_large:
        async for part in request.stream():
            body += part
            weight.add(part)
            if is_too_large := len(body) > MAX_BODY_BYTES:
                break
    if is_too_large:
        message = f"The request body is larger than {MAX_BODY_BYTES >> 20} MiB."
        raise HttpError(413, message, headers={"connection": "close"})
    return body, weight


def _bad_request_id() -> Response:
    message = "X-Request-Id must be 1 to 128 printable ASCII characters without spaces."
    return HttpError(400, message, param="X-Request-Id").response()
