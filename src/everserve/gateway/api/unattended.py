"""Requests of our own to the application: lines of batches, and responses that run in the background.

They take the same way as a client's request, from its route on, so that each has exactly the answer that a client would
have got. No connection stands behind them, and they know for whom they run.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message

from everserve.gateway.http.access import Owner

_SCOPE = "everserve.unattended"  # clients cannot set it: it is no header


@dataclass(frozen=True)
class Unattended:
    """The client that a call without a connection is made for."""

    owner: Owner  # for which places are shared
    identity: str  # to which what is kept belongs
    request_id: str
    created: int  # when it began, in its first life
    response_id: str | None = None  # it is this response of /v1/responses, which the store knows


def unattended(request: Request) -> Unattended | None:
    """None: a client's request."""
    found: Unattended | None = request.scope.get(_SCOPE)
    return found


async def call(app: ASGIApp, path: str, body: bytes, who: Unattended, on_body: Callable[[bytes], None]) -> int:
    """POST this; returns the status. A caller that cancels it has left, as a client leaves."""
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", who.request_id.encode()),
            (b"accept", b"text/event-stream;ids=no"),
        ],
        _SCOPE: who,
    }
    parts = [body]
    status = 0

    async def receive() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        await forever.wait()
        raise AssertionError("nothing sets it")

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            on_body(message.get("body", b""))

    forever = asyncio.Event()
    await app(scope, receive, send)
    return status
