"""Bad input costs nobody anything: the right status, one shape, and the server goes on."""

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

MIB = 1 << 20
GOOD = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def http(server) -> Any:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
        assert client.get("/health").status_code == 200
        assert client.get("/load").json() == {"server_load": 0}
        assert client.post("/v1/completions", json=GOOD).status_code == 200


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and len(body["error"]["message"]) < 1000
    return body["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "a"',
        b'{"prompt": "a"}}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": 1' + b"0" * 50 + b"}",
        b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"prompt": ' + b"[" * MIB,
        b'{"prompt": ' + b"[" * MIB + b"]" * MIB + b"}",
        b'{"prompt": "a", "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b"\x00" * 1000,
        "ünïcödé".encode("utf-16"),
    ],
    ids=range(18),
)
def test_bodies(http: httpx.Client, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        check_error(http.post(path, content=body, headers={"content-type": "application/json"}), 400)


def test_content_types(http: httpx.Client) -> None:
    body = json.dumps(GOOD).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/xml", "nonsense"):
        error = check_error(http.post("/v1/completions", content=body, headers={"content-type": kind}), 400)
        assert "application/json" in error["message"]
    error = check_error(http.post("/v1/completions", content=body), 400)  # no type at all
    assert "application/json" in error["message"]
    for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert http.post("/v1/completions", content=body, headers={"content-type": kind}).status_code == 200


def test_large_bodies(http: httpx.Client) -> None:
    check_error(http.post("/v1/completions", json={"prompt": "a" * (33 * MIB)}), 413)

    def chunks() -> Any:
        for _ in range(34):
            yield b" " * MIB

    try:
        response = http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    except httpx.WriteError:
        return  # the server had answered and closed before all was sent
    check_error(response, 413)


def test_a_long_prompt_does_not_hold_up_others(http: httpx.Client, server) -> None:
    """While a megabyte is tokenized, short requests are answered: the event loop never waits for it."""
    address = urlsplit(server.url)
    body = json.dumps({"prompt": "word and " * 100_000}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"

    async def run() -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.transport.set_write_buffer_limits(0)  # `drain` waits until everything has left
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        long = asyncio.create_task(reader.read())
        num_answered = 0
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            while not long.done():
                assert (await client.get("/version")).status_code == 200
                num_answered += 1
        writer.close()
        return num_answered, long.result()

    num_answered, answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 200 ") and json.loads(answer.partition(b"\r\n\r\n")[2])["count"] > 100_000
    assert num_answered, "others are answered too (that none waits: tests/unit/gateway/test_slices.py)"


def test_prompts_that_are_too_long(http: httpx.Client) -> None:
    for size in (30_000, 10_000_000):  # the second is not even tokenized
        for path, body in (
            ("/v1/completions", {"prompt": "word " * (size // 5)}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * (size // 5)}]}),
        ):
            error = check_error(http.post(path, json=body), 400)
            assert "maximum context length" in error["message"]


def test_paths_and_methods(http: httpx.Client) -> None:
    for path in ("/dashboard", "/nowhere", "/v1", "/v1/completions/", "/v1//models", "/%ff%00", "/../etc/passwd"):
        check_error(http.get(path), 404)
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
        response = http.request(method, "/v1/chat/completions")
        assert response.headers["allow"] == "POST"
        check_error(response, 405)
    check_error(http.post("/v1/models"), 405)
    assert http.head("/health").status_code == 200


def test_request_ids(http: httpx.Client) -> None:
    for bad in ("", "with space", "x" * 129, "tab\there"):
        check_error(http.get("/version", headers={"x-request-id": bad}), 400)
    assert http.get("/version", headers={"x-request-id": "x" * 128}).headers["x-request-id"] == "x" * 128


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: many\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http(http: httpx.Client, server, raw: bytes) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        sock.sendall(raw)
        answer = b""
        while part := sock.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_half_a_request(http: httpx.Client, server) -> None:
    """A client that promises a body and leaves."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
    assert http.get("/health").status_code == 200


@pytest.mark.long
def test_a_full_queue(start_server) -> None:
    """More streams than places: 503 with Retry-After, and the running stream is not disturbed."""
    long = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "n": 2, "stream": True}
    with start_server("--max-queue", "2") as server, httpx.Client(base_url=server.url, timeout=60) as http:
        with http.stream("POST", "/v1/completions", json=long) as running:
            lines = running.iter_lines()
            next(lines)
            refused = http.post("/v1/completions", json=GOOD)
            check_error(refused, 503)
            assert int(refused.headers["retry-after"]) >= 1
            check_error(http.post("/v1/completions", json={**GOOD, "n": 3}), 400)
            assert next(line for line in lines if line).startswith("data: {")
        for _ in range(200):
            if http.post("/v1/completions", json=GOOD).status_code == 200:
                return
        pytest.fail("the places were not given back")
