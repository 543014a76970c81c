"""Many streams, of which a client only counts tokens: with hundreds of them one that parses events would be the slowest
part of what it measures."""

import json
import select
import socket
import time
from dataclasses import dataclass, field
from itertools import accumulate
from urllib.parse import urlsplit

from everserve.errors import EverserveError

_EVENT, _LAST = b"data: ", b"data: [DONE]"
_TIMEOUT_S = 60.0


@dataclass
class CountedStream:
    """When tokens arrived, each in an event of its own, and how many."""

    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_bytes: int = 0  # of the whole answer, with its head
    has_ended: bool = False
    _rest: bytes = b""  # of a line that has not arrived entirely

    def take(self, data: bytes, now_s: float) -> None:
        """Some more of the answer."""
        self.num_bytes += len(data)
        whole, _, self._rest = (self._rest + data).rpartition(b"\n")
        self.has_ended = self.has_ended or _LAST in whole
        num = whole.count(_EVENT) - whole.count(_LAST)
        if num > 0:
            self.times_s.append(now_s)
            self.counts.append(num)

    def time_of(self, num_tokens: int) -> float:
        """When it had so many tokens."""
        for at_s, total in zip(self.times_s, accumulate(self.counts), strict=True):
            if total >= num_tokens:
                return at_s
        raise EverserveError(f"a stream ended after {sum(self.counts)} tokens")


def between_tokens_s(url: str, model: str, prompts: list[list[int]], max_tokens: int, num_warm: int) -> float:
    """Mean time between two tokens of a stream while all of them decode: from when the last one has had some tokens
    until the first one ends."""
    streams = read_all(url, model, prompts, max_tokens)
    begin_s = max(stream.time_of(num_warm) for stream in streams)
    end_s = min(stream.time_of(max_tokens) for stream in streams)
    if end_s <= begin_s:
        raise EverserveError("the first stream ended before the last one began: --tokens is too small")
    arrived = [
        (at_s, num)
        for stream in streams
        for at_s, num in zip(stream.times_s, stream.counts, strict=True)
        if begin_s < at_s <= end_s
    ]
    return (end_s - begin_s) * len(prompts) / sum(num for _, num in arrived)


def read_all(url: str, model: str, prompts: list[list[int]], max_tokens: int) -> list[CountedStream]:
    """All of them at once, to their ends."""
    address, poll = urlsplit(url), select.epoll()
    streams: dict[int, tuple[socket.socket, CountedStream]] = {}
    for prompt in prompts:
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        payload = json.dumps(body | {"temperature": 0.0, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection((address.hostname or "127.0.0.1", address.port or 80))
        connection.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        connection.setblocking(False)
        streams[connection.fileno()] = (connection, CountedStream())
        poll.register(connection, select.EPOLLIN)
    num_open = len(streams)
    while num_open:
        ready = poll.poll(_TIMEOUT_S)
        if not ready:
            raise EverserveError(f"{num_open} streams have stopped")
        for fd, _ in ready:
            connection, stream = streams[fd]
            data = connection.recv(1 << 16)
            stream.take(data, time.perf_counter())
            if stream.has_ended or not data:
                poll.unregister(fd)
                connection.close()
                num_open -= 1
    return [stream for _, stream in streams.values()]
