"""An HTTP client that believes nothing: it reads every byte of an answer, and says what is wrong with it."""

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 600.0  # a gateway that dies every second advances little in its lives


@dataclass
class Answer:
    """One, as it was framed."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes] = field(default_factory=list)

    def normal(self) -> Any:
        """Without what may differ between two answers to the same request. Events by choice: when each was made, and
        with which others, does not matter."""
        if "text/event-stream" not in self.headers["content-type"]:
            return self.status, _plain(json.loads(self.body))
        found: dict[Any, list[Any]] = {}
        assert self.body.endswith(b"\n\n"), self.body[-100:]
        for event in self.body.decode().split("\n\n")[:-1]:
            data = event.rpartition("data: ")[2]
            assert "HTTP/1.1" not in event, f"two heads: {event}"
            made = data if data == "[DONE]" else _plain(json.loads(data))
            choices = made.get("choices") if isinstance(made, dict) else None
            found.setdefault(choices[0]["index"] if choices else "end", []).append(made)
        return self.status, found

    @property
    def event_ids(self) -> list[int]:
        lines = self.body.decode().split("\n")
        return [int(line.removeprefix("id: ")) for line in lines if line.startswith("id: ")]


def _plain(body: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in body.items() if name not in ("id", "created")}
    if isinstance(body.get("usage"), dict):
        body["usage"].pop("prompt_tokens_details", None)
    return body


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        self._reader, self._writer = reader, writer
        self._rng = rng
        self._naps = False

    @classmethod
    async def connect(cls, address: tuple[str, int], rng: random.Random, is_slow: bool = False) -> "RawClient":
        sock = socket.socket()
        if is_slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 12 if is_slow else 1 << 22)
        client = cls(reader, writer, rng)
        client._naps = is_slow
        return client

    @property
    def port(self) -> int:
        """Its own."""
        return int(self._writer.get_extra_info("sockname")[1])

    async def send(self, requests: list[bytes], num_cuts: int = 0) -> None:
        """All of them, one behind the other, in so many more pieces."""
        raw = b"".join(requests)
        cuts = sorted(self._rng.randrange(len(raw)) for _ in range(num_cuts))
        for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            self._writer.write(raw[begin:end])
            await self._writer.drain()
            if end < len(raw):
                await asyncio.sleep(self._rng.random() * 0.05)

    async def receive(self) -> Answer:
        """Raises what is wrong with it."""
        return await asyncio.wait_for(self._receive(), TIMEOUT_S)

    async def _receive(self) -> Answer:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        status_line, *lines = head[:-4].split("\r\n")
        version, status, *_ = status_line.split(" ")
        assert version == "HTTP/1.1", head
        headers = dict(line.lower().split(": ", 1) for line in lines)
        assert len(headers) == len(lines), f"a header twice: {head}"
        if headers.get("transfer-encoding") != "chunked":
            body = await self._reader.readexactly(int(headers["content-length"]))
            return Answer(int(status), headers, body)
        chunks: list[bytes] = []
        while True:
            size = int((await self._reader.readline()).removesuffix(b"\r\n"), 16)
            chunk = await self._reader.readexactly(size + 2)
            assert chunk[-2:] == b"\r\n", chunk[-50:]
            if not size:
                return Answer(int(status), headers, b"".join(chunks), chunks)
            chunks.append(chunk[:-2])
            if self._naps and self._rng.random() < 0.2:
                await asyncio.sleep(0.01)

    async def receive_events(self, num: int) -> bytes:
        """The first ones of a stream, or all, without frames."""
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
        assert head.startswith(b"HTTP/1.1 200"), head
        data = b""
        while data.count(b"\n\n") < num and (chunk := await asyncio.wait_for(self._chunk(), TIMEOUT_S)):
            data += chunk
        return data

    async def rest_of_events(self) -> bytes:
        """What still comes before the answer or the connection ends, in whole chunks."""
        data = b""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):
            async for chunk in self.chunks():
                data += chunk
        return data

    async def chunks(self) -> AsyncIterator[bytes]:
        """Those that still come, to the last one."""
        while chunk := await asyncio.wait_for(self._chunk(), TIMEOUT_S):
            yield chunk

    async def _chunk(self) -> bytes:
        size = int((await self._reader.readline()).removesuffix(b"\r\n"), 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    async def close(self) -> None:
        """Says its last word, and hears the server's."""
        self._writer.write_eof()
        assert await asyncio.wait_for(self._reader.read(), TIMEOUT_S) == b"", "bytes behind the last answer"
        self._writer.close()

    async def last_word(self, request: bytes, num_cuts: int = 0) -> bytes:
        """Sends a request and says no more. Returns all that comes then."""
        await self.send([request], num_cuts)
        self._writer.write_eof()
        try:
            return await asyncio.wait_for(self._reader.read(), TIMEOUT_S)
        finally:
            self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


def post(path: str, body: Any, chunked: bool = False, **headers: str) -> bytes:
    """A whole request."""
    raw = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if not chunked:
        return "\r\n".join([*lines, f"content-length: {len(raw)}", "", ""]).encode() + raw
    parts = [raw[at : at + 700] for at in range(0, len(raw), 700)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return "\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode() + framed + b"0\r\n\r\n"
