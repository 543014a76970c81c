"""What HTTP needs here beyond Starlette: request ids, JSON bodies within limits, noticing that the client has left."""

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everserve.errors import RequestError
from everserve.gateway.http.bodies import LIGHT_BODY_BYTES, LIGHT_BODY_WEIGHT, MAX_BODY_WEIGHT, Weight, exact_weight
from everserve.gateway.http.errors import HttpError, explain_bad_json
from everserve.gateway.http.memory import Hold
from everserve.gateway.http.recorded import Recorded
from everserve.gateway.http.requests import UNSUPPORTED
from everserve.gateway.http.slices import Slices

MAX_BODY_BYTES = 32 << 20
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_VALUE_BYTES = 40  # of a number in a list, for each of which a body has a character at least
_encode = msgspec.json.Encoder().encode
_T = TypeVar("_T")


class RequestIds:
    """Middleware: every request has an id, the client's if it sent one, and every response says which.

    Leaves in `request.state`: `request_id`, and whether it is the client's own; `arrived_s`; `created_s`, the time that
    its answer says; `unique`, a name that no other request has; and `send_body`, which skips the layers of middleware
    between here and the route. They care only about how a response starts, and a stream's body is sent token by token.

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
        unique = uuid.uuid4().hex
        request_id = given.decode("ascii") if given is not None and is_valid else unique
        arrived_s, created_s = time.monotonic(), int(time.time())
        recorded: Recorded | None = scope.setdefault("state", {}).get("recorded")
        if recorded is not None:
            birth = recorded.birth
            request_id, arrived_s, created_s = birth.request_id, birth.arrived_s, birth.created_s
            unique = birth.unique

        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._count(scope, message["status"])
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        scope["state"].update(
            request_id=request_id,
            has_own_id=given is not None,
            arrived_s=arrived_s,
            created_s=created_s,
            unique=unique,
            send_body=send,
        )
        app: ASGIApp = self._app if is_valid else _bad_request_id(scope["path"])
        try:
            await app(scope, receive, send_with_id)
        except Exception:  # our own bug, answered further out (app.py)
            if not has_started:
                self._count(scope, 500)
            raise
        finally:
            if recorded is not None:
                recorded.done()

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


def held_by(request: Request) -> Hold:
    """The memory that this request holds."""
    state = request.scope["state"]
    if "held" not in state:  # it did not come through a connection of ours
        state["held"] = request.app.state.gateway.connections.memory.hold()
    held: Hold = state["held"]
    return held


async def read_json(
    request: Request, decoder: "msgspec.json.Decoder[_T]", unsupported: Mapping[str, str] = UNSUPPORTED
) -> _T:
    """The body as the struct that the decoder makes, or a RequestError that says what is wrong with it."""
    check_json(request)
    body, weight = await _read_body(request)
    slices: Slices = request.app.state.gateway.slices
    num_values = weight.at_most
    if num_values > MAX_BODY_WEIGHT and (num_values := (await slices.run(exact_weight(body)))[-1]) > MAX_BODY_WEIGHT:
        raise RequestError("The request body has too many values to be decoded at once. Please send less at a time.")
    try:
        if weight.at_most <= LIGHT_BODY_WEIGHT and len(body) <= LIGHT_BODY_BYTES:
            return decoder.decode(body)
        held_by(request).set(len(body) + _VALUE_BYTES * num_values)
        return await slices.call(lambda: decoder.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise explain_bad_json(error, unsupported) from error
    finally:
        body.clear()  # now, not when the last reference goes: an error keeps the frames that it has passed


async def read_body(request: Request) -> bytearray:
    """A body that is not JSON."""
    body, _ = await _read_body(request)
    return body


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
        try:
            async for part in request.stream():
                body += part
                weight.add(part)
                if is_too_large := len(body) > MAX_BODY_BYTES:
                    break
        except ClientDisconnect:
            body.clear()
            raise
    if is_too_large:
        body.clear()
        message = f"The request body is larger than {MAX_BODY_BYTES >> 20} MiB."
        raise HttpError(413, message, headers={"connection": "close"})
    return body, weight


def _bad_request_id(path: str) -> Response:
    message = "X-Request-Id must be 1 to 128 printable ASCII characters without spaces."
    return HttpError(400, message, param="X-Request-Id").response(path)
