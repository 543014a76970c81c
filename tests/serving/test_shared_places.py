"""Clients that ask for very much, beside one that asks for little: real servers, real clients."""

import collections
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from everserve.procs.local_server import LocalServer
from tests.serving.test_slow_clients import peak_bytes

NUM_CHOICES, NUM_TOKENS, MANY_TOKENS = 16, 300, 3000
FLAGS = (
    *("--max-num-seqs", "4", "--max-queue", "24", "--request-memory-bytes", str(64 << 20)),
    *("--api-key", "first", "--api-key", "second", "--key-weight", "1", "--key-weight", "3"),
)
NUM_BODIES, BODY_BYTES = 30, 12 << 20
MAX_GROWTH_BYTES = (
    160 << 20
)  # 64 MiB that requests may hold, the same in the ledger, and what decoding one adds to that


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer("demo", *FLAGS) as made:
        yield made


def connect(server: LocalServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)


def post(server: LocalServer, body: bytes, key: str = "first") -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection = connect(server)
    connection.request("POST", "/v1/completions", body, headers)
    return connection.getresponse()


def ask(**more: Any) -> bytes:
    asked = {"prompt": "ROMEO:", "seed": 7, "ignore_eos": True, "return_token_ids": True, "stream": True}
    return json.dumps({**asked, **more}).encode()


class Reader:
    """A stream, event by event."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        assert response.status == 200, response.read()
        self.tokens: dict[int, list[int]] = collections.defaultdict(list)
        self._response = response

    def read(self, until: int | None = None) -> "Reader":
        """To the end, or until so many choices have a token."""
        while until is None or len(self.tokens) < until:
            line = self._response.readline()
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    self.tokens[choice["index"]] += choice["token_ids"]
            if line.startswith(b"data: [DONE]"):
                break
        return self


@pytest.mark.parametrize("echo", [{}, {"echo": True, "logprobs": 2, "prompt": "It was a cold evening. " * 10}])
def test_a_small_request_beside_a_large_one(server: LocalServer, echo: dict[str, Any]) -> None:
    """It has its answer before any choice of the large one has ended, and all tokens are what they would be alone."""
    large, small = ask(n=NUM_CHOICES, max_tokens=NUM_TOKENS, **echo), ask(max_tokens=4)
    alone = Reader(post(server, large)).read(), Reader(post(server, small)).read()
    num_before = num_ended(server)
    beside = Reader(post(server, large)).read(until=2)
    quick = Reader(post(server, small)).read()
    assert quick.tokens == alone[1].tokens
    assert num_ended(server) == num_before + 1, "no choice of the large one"
    assert len(beside.read().tokens) == NUM_CHOICES
    assert beside.tokens == alone[0].tokens


def test_each_key_has_a_queue(server: LocalServer) -> None:
    response = post(server, ask(n=NUM_CHOICES, max_tokens=MANY_TOKENS))  # none of them ends meanwhile
    Reader(response).read(until=2)
    refused = post(server, ask(n=NUM_CHOICES))
    assert refused.status == 503 and refused.getheader("retry-after") == "1"
    assert "16 of 24 places of this API key" in json.loads(refused.read())["error"]["message"]
    other = Reader(post(server, ask(n=NUM_CHOICES, max_tokens=2), key="second")).read()
    assert len(other.tokens) == NUM_CHOICES
    response.close()


def test_bodies_that_are_too_much_together(server: LocalServer) -> None:
    """Clients that send all of a body before they read get a status, and the gateway's memory has a bound."""
    pid = gateway_pid(server)
    before, body = peak_bytes(pid), ask(prompt="x" * BODY_BYTES)
    statuses: collections.Counter[tuple[int, str | None]] = collections.Counter()

    def send() -> None:
        response = post(server, body)
        assert set(json.loads(response.read())["error"]) == {"message", "type", "param", "code"}
        statuses[response.status, response.getheader("retry-after")] += 1

    threads = [threading.Thread(target=send) for _ in range(NUM_BODIES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(statuses.values()) == NUM_BODIES, "each client has a status"
    assert set(statuses) == {(400, None), (503, "1")}, statuses
    assert peak_bytes(pid) - before < MAX_GROWTH_BYTES
    assert "\neverserve_request_memory_bytes 0.0\n" in metrics(server)


def metrics(server: LocalServer) -> str:
    connection = connect(server)
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


def num_ended(server: LocalServer) -> float:
    """Streams, so far."""
    lines = metrics(server).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total{"))


def gateway_pid(server: LocalServer) -> int:
    connection = connect(server)
    connection.request("GET", "/cluster", headers={"Authorization": "Bearer first"})
    processes = json.loads(connection.getresponse().read())["processes"]
    return next(process["pid"] for process in processes if process["name"] == "gateway")
