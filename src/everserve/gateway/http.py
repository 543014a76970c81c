"""One HTTP exchange over ASGI: headers, body, response, and noticing that the client has left."""

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import msgspec

from everserve.errors import RequestError
from everserve.gateway.errors import HttpError, explain_bad_json

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

MAX_BODY_BYTES = 32 << 20
JSON = b"application/json"
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client left before it had sent its request."""


class Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = uuid.uuid4().hex
        self.arrived_s = time.monotonic()
        self.has_started = False
        self._receive = receive
        self._send = send

    def take_request_id(self) -> None:
        """Use the client's X-Request-Id, if it sent one."""
        given = self.headers.get(b"x-request-id")
        if given is None:
            return
        if not _REQUEST_ID.fullmatch(given):
            raise RequestError(
                "X-Request-Id must be 1 to 128 printable ASCII characters without spaces.", "X-Request-Id"
            )
        self.request_id = given.decode("ascii")

    async def body(self) -> bytes:
        """The whole body; 413 if it is larger than anything reasonable."""
        length = self.headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            raise _too_large()
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise _too_large()
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def json_body(self, decoder: "msgspec.json.Decoder[Any]", unsupported: frozenset[str]) -> Any:
        """The body as the struct that the decoder makes, or a RequestError that says what is wrong with it."""
        content_type = self.headers.get(b"content-type", JSON).split(b";")[0].strip().lower()
        if content_type != JSON:
            raise RequestError("The request must have 'Content-Type: application/json'.")
        body = await self.body()
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise explain_bad_json(error, unsupported) from error

    async def respond(self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers = ()) -> None:
        """A complete response."""
        await self.start(status, content_type, ((b"content-length", str(len(body)).encode()), *headers))
        await self.write(body, is_last=True)

    async def respond_json(self, data: Any) -> None:
        await self.respond(200, _encode(data))

    async def start(self, status: int, content_type: bytes, headers: Headers = ()) -> None:
        """Status and headers, once; `write` follows."""
        if self.has_started:
            return
        self.has_started = True
        all_headers = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode()), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    async def write(self, body: bytes, is_last: bool = False) -> None:
        """A piece of the body; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    @contextmanager
    def watch_disconnect(self, on_disconnect: Callable[[], None]) -> Iterator[None]:
        """Call back if the client leaves; the body must have been read before."""
        task = asyncio.ensure_future(self._until_disconnect())

        def on_done(done: "asyncio.Future[None]") -> None:
            if not done.cancelled():
                on_disconnect()

        task.add_done_callback(on_done)
        try:
            yield
        finally:
            task.cancel()

    async def _until_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _too_large() -> HttpError:
    return HttpError(
        413,
        f"The request body is larger than {MAX_BODY_BYTES >> 20} MiB.",
        headers=((b"connection", b"close"),),
    )
