"""A lean streaming client: raw HTTP over asyncio, so that measuring costs little of the machine that is measured."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Stream:
    """One completion as its client saw it: when it was sent, and when each token's event arrived."""

    started_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None

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
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        payload = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        )
        stream.started_s = time.perf_counter()
        writer.write(head.encode() + payload)
        await _read_head(reader, stream)
        await _read_events(reader, stream)
    finally:
        writer.close()
    return stream


async def _read_head(reader: asyncio.StreamReader, stream: Stream) -> None:
    """Status and headers; an answer other than 200 is the stream's error."""
    status = (await reader.readline()).split()
    while (await reader.readline()).strip():
        pass
    if status[1:2] != [b"200"]:
        stream.error = f"HTTP {b' '.join(status[1:]).decode()}: {(await reader.read()).decode(errors='replace')}"


async def _read_events(reader: asyncio.StreamReader, stream: Stream) -> None:
    """Server-sent events, whatever the transfer encoding: only lines that begin with `data:` matter."""
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        now = time.perf_counter()
        if line.startswith(b"data: [DONE]"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            stream.error = event["error"]["message"]
            continue
        for choice in event["choices"]:
            ids = choice.get("token_ids") or []
            stream.token_ids += ids
            stream.text += choice.get("text", "")
            stream.arrivals_s += [now] * len(ids)
            stream.finish_reason = choice.get("finish_reason") or stream.finish_reason
    stream.error = stream.error or "the connection ended before the stream did"


def complete_all(url: str, model: str, prompts: list[list[int]], max_tokens: int, **params: Any) -> list[Stream]:
    """All prompts at once, one connection each."""

    async def run() -> list[Stream]:
        return await asyncio.gather(*(complete(url, model, prompt, max_tokens, **params) for prompt in prompts))

    return asyncio.run(run())


def percentile(values: list[float], q: float) -> float:
    """The q-quantile (0..1), nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")
