"""Requests that are a lot of work for the gateway, beside streams: every stream is what it would be alone.

What makes sure that the event loop goes on meanwhile is in tests/unit/gateway/test_slices.py; here the largest gap
between two tokens of any stream is printed (`pytest -s`).
"""

import asyncio
import json
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

from everserve.client import Stream
from everserve.procs.local_server import LocalServer
from tests.support.cluster import asks, assert_equal, run_all

STREAMS = asks(4, num_prompt=12, max_tokens=100)
MESSAGE = {"role": "user", "content": ""}
LOGPROBS = {"prompt": [7] * 200, "n": 16, "max_tokens": 1, "echo": True, "logprobs": 20}


def hostile_requests() -> list[tuple[str, str, bytes, int]]:
    """(name, path, body, the status that it must get)"""
    keys = ",".join(f'"k{i}":1' for i in range(250_000))
    kwargs = f'{{"messages":[{json.dumps(MESSAGE)}],"chat_template_kwargs":{{{keys}}}}}'
    bodies: list[tuple[str, str, Any, int]] = [
        ("250,000 template variables", "/v1/chat/completions", kwargs.encode(), 400),
        ("a name of 8 MB", "/v1/completions", b'{"prompt":"a","%b":1}' % (b"`" * 8_000_000), 400),
        ("125,000 messages", "/v1/chat/completions", {"messages": [MESSAGE] * 125_000}, 400),
        ("1,500 messages", "/v1/chat/completions", {"messages": [MESSAGE] * 1_500, "max_tokens": 1}, 200),
        ("250,000 ids", "/v1/completions", {"prompt": [5] * 250_000}, 400),
        ("a long text", "/tokenize", {"prompt": "word, and " * 25_000, "return_token_strs": True}, 200),
        ("16 choices with logprobs", "/v1/completions", LOGPROBS, 200),
        ("16 streamed choices with logprobs", "/v1/completions", {**LOGPROBS, "stream": True}, 200),
    ]
    return [
        (name, path, body if isinstance(body, bytes) else json.dumps(body).encode(), status)
        for name, path, body, status in bodies
    ]


class Sender(threading.Thread):
    """Sends one request, and reads its answer, with as little work as possible: the streams are read beside it."""

    def __init__(self, url: str, path: str, body: bytes) -> None:
        super().__init__()
        self.answer = b""
        self._address = urlsplit(url)
        head = f"POST {path} HTTP/1.1\r\nHost: {self._address.netloc}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body

    def run(self) -> None:
        parts = []
        with socket.create_connection((self._address.hostname, self._address.port), timeout=120) as sock:
            sock.sendall(self._request)
            while part := sock.recv(1 << 20):
                parts.append(part)
        self.answer = b"".join(parts)


async def run_beside(server: LocalServer, sender: Sender) -> list[list[Stream]]:
    """All streams, again and again until the sender, which begins when all of them decode, has its answer."""
    rounds: list[list[Stream]] = []
    while not rounds or sender.is_alive():
        streams = [Stream() for _ in STREAMS]
        tasks = [asyncio.ensure_future(ask.send(server, s)) for ask, s in zip(STREAMS, streams, strict=True)]
        while not rounds and not all(stream.token_ids for stream in streams):
            await asyncio.sleep(0.001)
        if not rounds:
            sender.start()
        await asyncio.gather(*tasks)
        rounds.append(streams)
    return rounds


def test_streams_beside_large_requests(server: LocalServer) -> None:
    expected = run_all(server, STREAMS)
    for name, path, body, status in hostile_requests():
        sender = Sender(server.url, path, body)
        rounds = asyncio.run(run_beside(server, sender))
        sender.join()
        for streams in rounds:
            assert_equal(streams, expected)
        assert sender.answer.startswith(b"HTTP/1.1 %d " % status), (name, sender.answer[:1000])
        gap_s = max(max(stream.gaps_s) for streams in rounds for stream in streams)
        print(f"{name}: largest gap {1e3 * gap_s:.0f} ms")
        if name == "16 choices with logprobs":
            choices = json.loads(sender.answer.partition(b"\r\n\r\n")[2])["choices"]
            assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [201] * 16
