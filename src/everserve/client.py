"""A lean streaming client: raw HTTP over asyncio, so that measuring costs little of the machine that is measured."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from everserve.errors import EverserveError


class Broken(EverserveError):
    """The connection ended before the answer did."""


class Event(NamedTuple):
    """One server-sent event: what `Last-Event-ID` calls it, if it has a name, and when it arrived."""

    id: str | None
    data: dict[str, Any]
    at_s: float


class Connection:
    """One request and its answer, on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._is_chunked = False
        self._lines: deque[bytes] = deque()
        self._rest = b""  # of a line that has not arrived entirely
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case

    @classmethod
    async def open(
        cls, url: str, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> "Connection":
        """Send a request. The answer is not waited for: see `read_head`."""
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        payload = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {address.netloc}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
        writer.write("\r\n".join([*lines, "", ""]).encode() + payload)
        return cls(reader, writer)

    async def read_head(self) -> int:
        """Status and headers; returns the status."""
        status = (await self._reader.readline()).split()
        if len(status) < 2 or not status[1].isdigit():
            raise Broken("the connection ended before the answer began")
        self.status = int(status[1])
        while line := (await self._reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "")
        return self.status

    async def read_body(self) -> bytes:
        """All of it."""
        parts = []
        while part := await self._read_part():
            parts.append(part)
        body = b"".join(parts)
        if len(body) < int(self.headers.get("content-length", 0)):
            raise Broken("the connection ended in the middle of the answer")
        return body

    async def read_event(self) -> Event | None:
        """The next event; None at the end of the stream, which says of itself that it is the end."""
        id: str | None = None
        while (line := await self._read_line()) is not None:
            if line.startswith(b"id:"):
                id = line[3:].strip().decode()
            elif line.startswith(b"data: [DONE]"):
                return None
            elif line.startswith(b"data:"):
                return Event(id, json.loads(line[5:]), time.perf_counter())
        raise Broken("the connection ended before the stream did")

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Be gone, as a client that crashed is: what is under way to us gets a reset for an answer."""
        self._writer.transport.abort()

    async def _read_line(self) -> bytes | None:
        while not self._lines:
            part = await self._read_part()
            if not part:
                return None
            *lines, self._rest = (self._rest + part).split(b"\n")
            self._lines.extend(lines)
        return self._lines.popleft()

    async def _read_part(self) -> bytes:
        """A piece of the body; nothing at its end, and where the connection breaks."""
        try:
            if not self._is_chunked:
                return await self._reader.read(1 << 16)
            size = int((await self._reader.readline()).strip() or b"0", 16)
            return (await self._reader.readexactly(size + 2))[:-2]
        except asyncio.IncompleteReadError:
            return b""


def key_headers(*keys: str | None) -> dict[str, str]:
    """The header that carries the first of these keys that there is. A variable may hold all keys of a server."""
    found = [key for given in keys for key in (given or "").split()]
    return {"Authorization": f"Bearer {found[0]}"} if found else {}


def unauthorized(url: str, headers: Mapping[str, str], flags: str = "--api-key") -> str:
    """What is wrong when a server answers 401 to a request with these headers."""
    wrong = "says that this API key is wrong" if "Authorization" in headers else "wants an API key"
    return f"{url} {wrong}: see {flags}"


@dataclass
class Stream:
    """One completion as its client saw it: when it was sent, and when each token's event arrived."""

    started_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    id: str = ""  # of the answer: names of its streams in the server's events begin with it
    masked: list[tuple[int, int]] = field(default_factory=list)  # tokens marked as not exact: first, end

    @property
    def first_token_s(self) -> float:
        return self.arrivals_s[0] - self.started_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in pairwise(self.arrivals_s)]


async def complete(
    url: str, model: str, prompt: str | list[int], max_tokens: int, stream: Stream | None = None, **params: Any
) -> Stream:
    """Stream one completion, filling `stream` as events arrive; greedy and without end unless told otherwise."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        **params,
    }
    stream = stream or Stream()
    connection = await Connection.open(url, "POST", "/v1/completions", body)
    stream.started_s = time.perf_counter()
    try:
        if await connection.read_head() != 200:
            message = (await connection.read_body()).decode(errors="replace")
            stream.error = f"HTTP {connection.status}: {message}"
        else:
            await _read_events(connection, stream)
    except Broken as error:
        stream.error = stream.error or str(error)
    finally:
        connection.close()
    return stream


async def _read_events(connection: Connection, stream: Stream) -> None:
    while event := await connection.read_event():
        if "error" in event.data:
            stream.error = event.data["error"]["message"]
            continue
        stream.id = event.data.get("id", "")
        for choice in event.data["choices"]:
            ids = choice.get("token_ids") or []
            stream.masked += [(first, end) for first, end in choice.get("degraded", {}).get("masked_ranges", ())]
            stream.token_ids += ids
            stream.text += choice.get("text", "")
            stream.arrivals_s += [event.at_s] * len(ids)
            stream.finish_reason = choice.get("finish_reason") or stream.finish_reason


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of them. As a task this may be left behind when a program is interrupted; a bare `gather` complains."""
    await asyncio.gather(*works)


def complete_all(url: str, model: str, prompts: list[list[int]], max_tokens: int, **params: Any) -> list[Stream]:
    """All prompts at once, one connection each."""

    async def run() -> list[Stream]:
        return await asyncio.gather(*(complete(url, model, prompt, max_tokens, **params) for prompt in prompts))

    return asyncio.run(run())


def percentile(values: list[float], q: float) -> float:
    """The q-quantile (0..1), nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")
