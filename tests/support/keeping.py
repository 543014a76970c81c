"""A gateway without processes that has a store, and what its scripted workers say."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from everserve.gateway.store.store import Store
from everserve.tables.requests import RequestSpec
from tests.support.gateway_toy import ToyServer, byte_level_tokenizer, toy_server

TOKENIZER = byte_level_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def says(text: str) -> Callable[[RequestSpec], list[int]]:
    return lambda spec: ids(text)


@asynccontextmanager
async def keeping(directory: Path, script: Any, max_bytes: int = 64 << 20, **changes: Any) -> AsyncIterator[ToyServer]:
    """A server with a store in this directory."""
    async with toy_server(script, **changes) as server:
        store = server.gateway.store = Store(directory, max_bytes, 1.0)
        jobs = asyncio.ensure_future(server.app.state.jobs.run())
        try:
            yield server
        finally:
            server.app.state.jobs.close()
            jobs.cancel()
            await asyncio.gather(jobs, return_exceptions=True)
            store.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]
