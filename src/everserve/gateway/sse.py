"""Server-sent events: how a stream looks on the wire."""

from typing import Any

import msgspec

CONTENT_TYPE = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": still here\n\n"  # a comment: keeps proxies from closing an idle stream

_encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    """One event without a name: what OpenAI clients read. JSON has no raw newlines, so one `data:` line is enough."""
    return b"data: " + _encode(data) + b"\n\n"


def error_event(body: bytes) -> bytes:
    """The last event of a stream that broke; no [DONE] follows, so that it cannot be taken for a complete answer."""
    return b"data: " + body + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """One typed event, for `EventSource.addEventListener(name, ...)`."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"
