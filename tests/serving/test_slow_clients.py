"""Slow and endless requests beside streams: the streams do not notice, and the gateway's memory stays as it is."""

import asyncio
import contextlib
from pathlib import Path

import httpx

from everserve.client import Stream, complete

NUM_SLOW = 500  # clients, in equal parts ...
KINDS = ("silent", "slow headers", "slow body", "endless headers")
NUM_STREAMS, NUM_TOKENS = 8, 300
ENDLESS_BYTES = 4 << 20  # sent by each client whose headers do not end, if it is allowed to
MAX_GROWTH_BYTES = 128 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


class SlowClient:
    """One that never completes its request, and remembers how it ended."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.answer = b""
        self.is_closed = False  # by the server

    async def run(self, address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address)
        sending = asyncio.create_task(self._send(writer))
        try:
            while part := await reader.read(1 << 16):
                self.answer += part
        except ConnectionError:
            pass
        finally:
            self.is_closed = True
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            if self.kind == "endless headers":
                writer.write(HEAD + b"x: ")
                for _ in range(ENDLESS_BYTES >> 16):
                    writer.write(b"a" * (1 << 16))
                    await writer.drain()
            elif self.kind != "silent":
                writer.write(HEAD + (b"content-length: 1000\r\n\r\n" if self.kind == "slow body" else b"x: "))
                while True:
                    await asyncio.sleep(0.5)
                    writer.write(b"a")


def peak_bytes(pid: int) -> int:
    """The most memory that the process has ever had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


async def write_all(server) -> list[Stream]:
    prompts = (f"{i}. It was a cold evening" for i in range(NUM_STREAMS))
    return await asyncio.gather(*(complete(server.url, server.model, prompt, NUM_TOKENS) for prompt in prompts))


def test_streams_do_not_notice_500_slow_clients(server) -> None:
    processes = httpx.get(f"{server.url}/cluster", timeout=None).json()["processes"]
    gateway = next(process["pid"] for process in processes if process["name"] == "gateway")
    url = httpx.URL(server.url)
    clients = [SlowClient(KINDS[i % len(KINDS)]) for i in range(NUM_SLOW)]

    async def run() -> tuple[list[Stream], list[Stream]]:
        undisturbed = await write_all(server)
        running = [asyncio.create_task(client.run((url.host, url.port))) for client in clients]
        try:
            disturbed = await write_all(server)
            endless = [client for client in clients if client.kind == "endless headers"]
            await until(lambda: all(client.is_closed for client in endless))
            slow = [client for client in clients if client.kind != "endless headers"]
            await until(lambda: sum(not client.is_closed for client in slow) <= 256)
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as fresh:
                assert (await fresh.get("/health")).status_code == 200
                assert (await fresh.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return undisturbed, disturbed

    before = peak_bytes(gateway)
    undisturbed, disturbed = asyncio.run(run())
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert other.error is None and other.finish_reason == "length"
        assert len(other.token_ids) == NUM_TOKENS and other.token_ids == one.token_ids
    assert any(client.answer.startswith(b"HTTP/1.1 431 ") for client in clients if client.kind == "endless headers")
    assert peak_bytes(gateway) - before < MAX_GROWTH_BYTES


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
