"""An HTTP server in the test's own loop, which says what the test wants and may stop in the middle of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Asked:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any

    @property
    def is_resumable(self) -> bool:
        return "x-request-id" in self.headers


Respond = Callable[[Asked], AsyncIterator[bytes]]  # the raw answer, piece by piece; it ends: the connection does too


@asynccontextmanager
async def serving(respond: Respond) -> AsyncIterator[str]:
    """Yields the address."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async for part in respond(await read_request(reader)):
                writer.write(part)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def read_request(reader: asyncio.StreamReader) -> Asked:
    method, path, _ = (await reader.readline()).decode().split()
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, path, headers, json.loads(body) if body else None)


def head(status: int = 200, content_type: str = "text/event-stream") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nConnection: close\r\n\r\n".encode()


def json_answer(data: Any, status: int = 200) -> bytes:
    return head(status, "application/json") + json.dumps(data).encode()


def event(data: Any, id: int | None = None) -> bytes:
    prefix = f"id: {id}\n" if id is not None else ""
    return f"{prefix}data: {json.dumps(data)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def token_event(token: int, id: int | None = None, index: int = 0, finish_reason: str | None = None) -> bytes:
    choice = {"index": index, "text": f"<{token}>", "token_ids": [token], "finish_reason": finish_reason}
    return event({"choices": [choice]}, id)


def usage_event(num_prompt: int, num_completion: int, id: int | None = None) -> bytes:
    total = num_prompt + num_completion
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": total}
    return event({"choices": [], "usage": usage}, id)
