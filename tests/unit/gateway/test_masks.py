"""Tokens that were sampled under a mask of experts say so, in every kind of answer; the next worker hears of it too."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from everserve.tables.outputs import Output
from everserve.tables.requests import Masked
from tests.support.gateway_toy import ScriptedWorker, toy_server, until

MASKED = Masked(5, 2)
TOKENS = [50, 51, 52, 53, 54]
PATHS = {"/v1/completions": {"prompt": "say"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]}}


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


def answer(worker: ScriptedWorker, id: str, first: int, end: int, masked: Masked | None) -> None:
    for index in range(first, end):
        finish_reason = "length" if index + 1 == len(TOKENS) else None
        worker.send(Output(id=id, index=index, token=TOKENS[index], finish_reason=finish_reason, masked=masked))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_masked_is_marked(path: str, is_stream: bool) -> None:
    """Also across a worker's death: the next one is told from which position on KV is not exact."""

    async def test() -> None:
        async with toy_server() as server:
            first = server.worker
            options: dict[str, Any] = {"stream_options": {"include_usage": True}} if is_stream else {}
            body = {**PATHS[path], "max_tokens": len(TOKENS), "stream": is_stream, **options}
            asked = asyncio.ensure_future(server.post(path, body))
            await until(lambda: bool(first.specs))
            id = first.specs[0].id
            assert first.specs[0].masked is None
            answer(first, id, 0, 1, None)
            answer(first, id, 1, 3, MASKED)
            await until(lambda: server.gateway.fleet.totals.cadence is not None and num_tokens(server) == 3)
            second = await server.add_worker(1)
            first.die()
            await until(lambda: bool(second.specs))
            assert list(second.specs[0].known) == TOKENS[:3] and second.specs[0].masked == MASKED
            answer(second, id, 3, 4, None)
            answer(second, id, 4, 5, Masked(9, 3))
            check(await asked, is_stream)

    run(test)


def num_tokens(server: Any) -> int:
    return sum(len(stream.tokens) for link in server.gateway.fleet.ready_links() for stream in link.streams)


def check(response: Any, is_stream: bool) -> None:
    if not is_stream:
        (choice,) = response.json["choices"]
        assert choice["degraded"] == {"masked_ranges": [[1, 3], [4, 5]]}
        assert response.json["usage"]["masked_tokens"] == 3
        return
    *events, usage, done = response.events
    choices = [event["choices"][0] for event in events if "role" not in event["choices"][0].get("delta", {})]
    marks = [choice.get("degraded") for choice in choices]
    assert marks == [None, *({"masked_ranges": [[i, i + 1]]} for i in (1, 2)), None, {"masked_ranges": [[4, 5]]}]
    assert usage["usage"]["masked_tokens"] == 3 and done == "[DONE]"


@pytest.mark.parametrize("path", PATHS)
def test_without_a_mask_nothing_is_said(path: str) -> None:
    async def test() -> None:
        async with toy_server() as server:
            asked = asyncio.ensure_future(server.post(path, {**PATHS[path], "max_tokens": len(TOKENS)}))
            await until(lambda: bool(server.worker.specs))
            answer(server.worker, server.worker.specs[0].id, 0, 5, None)
            response = await asked
            assert b"degraded" not in response.body and b"masked" not in response.body

    run(test)
