"""Streams whose events C writes, over real connections: their clients read what they would have read without it."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn

from everserve.gateway.http.server import Server
from everserve.gateway.http.transport import Custody
from everserve.gateway.streams.plain import PlainStream
from everserve.tables.outputs import Output
from everserve.tables.requests import RequestSpec
from tests.support.gateway_toy import ToyServer, toy_server, until
from tests.support.ledgers import mapped_ledger
from tests.support.raw_client import RawClient, post

A = 65 - 32  # of the toy's tokens


class World:
    """A toy server, and the clients of its socket."""

    def __init__(self, toy: ToyServer, address: tuple[str, int]) -> None:
        self.toy = toy
        self.address = address

    async def ask(self, num_tokens: int, path: str = "/v1/completions", **more: object) -> RawClient:
        """One more stream, which the worker has."""
        before = len(self.toy.worker.specs)
        client = await RawClient.connect(self.address, random.Random(0))
        asked = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
        body = {"model": "toy", "max_tokens": num_tokens, "seed": 1, "stream": True, **asked, **more}
        await client.send([post(path, body)])
        await until(lambda: len(self.toy.worker.specs) > before)
        return client

    @property
    def plain(self) -> list[bool]:
        """Of each stream, whether C writes it."""
        link = self.toy.gateway.fleet.link(self.toy.worker.rank)
        assert link is not None
        return [stream.plain is not None for stream in link.streams]

    def say(self, *tokens: tuple[RequestSpec, int, int], ends: int = -1) -> None:
        """A step: token `index` of each stream; the one in place `ends` ends with it."""
        self.toy.worker.send(
            *(
                Output(id=spec.id, index=index, token=token, finish_reason="length" if at == ends else None)
                for at, (spec, index, token) in enumerate(tokens)
            )
        )


@asynccontextmanager
async def world(is_paced: bool = False) -> AsyncIterator[World]:
    """`is_paced`: the worker says what the toy's script has; else what the test says."""
    async with toy_server((lambda spec: SCRIPT) if is_paced else None, is_paced=is_paced) as toy:
        connections = toy.gateway.connections
        connections.custody = Custody(mapped_ledger())
        config = uvicorn.Config(toy.app, ws="none", lifespan="off", log_config=None, log_level="critical")
        server = Server(config, connections)
        with socket.create_server(("127.0.0.1", 0)) as listen:
            serving = asyncio.create_task(server.serve(sockets=[listen]))
            await until(lambda: server.started)
            try:
                yield World(toy, listen.getsockname())
            finally:
                server.should_exit = server.force_exit = True
                await serving


# Words, halves of characters, bytes that are no UTF-8, a special token, and enough for several pages.
SCRIPT = [1 + (7 * i * i + i // 9) % 264 for i in range(50)] + [1 + i % 90 for i in range(300)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, {"stop": ["Z"]}, {"n": 2}])
def test_a_client_reads_the_same(path: str, more: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(is_plain: bool) -> tuple[object, bool]:
        with monkeypatch.context() as patch:
            if not is_plain:
                patch.setattr(PlainStream, "begin", lambda *arguments: False)
            async with world(is_paced=True) as one:
                one.toy.worker.say_ready(max_model_len=512)
                client = await one.ask(len(SCRIPT), path, ignore_eos=True, **more)
                was_plain = False
                while one.toy.worker.advance():
                    for _ in range(6):
                        await asyncio.sleep(0)
                    was_plain |= any(one.plain)
                answer = (await client.receive()).normal()
                await client.close()
                return answer, was_plain

    (plain, was_plain), (python, _) = asyncio.run(read(True)), asyncio.run(read(False))
    assert plain == python
    assert was_plain is not ("stop" in more or "n" in more)


def test_streams_of_one_step_when_one_of_them_ends() -> None:
    """Those before it in the step are written when it ends, and those behind it are not forgotten."""

    async def test() -> None:
        async with world() as one:
            clients = [await one.ask(20) for _ in range(3)]
            specs = one.toy.worker.specs
            for index in range(6):
                one.say(*((spec, index, A + index) for spec in specs))
                await asyncio.sleep(0.01)
            await until(lambda: one.plain == [True] * 3)
            one.say(*((spec, 6, A) for spec in specs), ends=1)
            one.say((specs[0], 7, A + 1), (specs[2], 7, A + 1))
            for index in (8, 9):
                one.say((specs[0], index, A), (specs[2], index, A), ends=(index - 9) % 3)
            one.say((specs[2], 10, A), ends=0)
            texts = [text_of((await client.receive()).normal()) for client in clients]
            assert texts == ["ABCDEFABAA", "ABCDEFA", "ABCDEFABAAA"]

    asyncio.run(test())


def test_a_client_that_does_not_read_goes_back_to_python() -> None:
    async def test() -> None:
        async with world() as one:
            one.toy.worker.say_ready(max_model_len=1 << 16, num_blocks=1 << 16)
            client = await one.ask(60_000)
            (spec,) = one.toy.worker.specs
            link = one.toy.gateway.fleet.link(one.toy.worker.rank)
            assert link is not None
            index, was_plain = 0, False
            (stream,) = link.streams
            while not (was_plain and stream.plain is None and stream.listener._owner.outbox.has_pending):  # type: ignore
                one.say((spec, index, A))
                index += 1
                await asyncio.sleep(0)
                was_plain |= stream.plain is not None
            one.say((spec, index, A + 1), ends=0)
            assert text_of((await client.receive()).normal()) == "A" * index + "B"

    asyncio.run(test())


def test_a_client_that_leaves() -> None:
    async def test() -> None:
        async with world() as one:
            clients = [await one.ask(50) for _ in range(2)]
            specs = one.toy.worker.specs
            for index in range(6):
                one.say(*((spec, index, A) for spec in specs))
                await asyncio.sleep(0.01)
            await until(lambda: one.plain == [True] * 2)
            clients[0].abort()
            await until(lambda: one.toy.worker.cancelled == [specs[0].id])
            one.say((specs[1], 6, A + 1), ends=0)
            assert text_of((await clients[1].receive()).normal()) == "AAAAAAB"
            assert one.toy.gateway.connections.custody.ledger.num_free_pages > 0

    asyncio.run(test())


def text_of(answer: object) -> str:
    status, events = answer  # type: ignore[misc]
    assert status == 200
    return "".join(event["choices"][0]["text"] for event in events[0])
