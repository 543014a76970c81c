"""What a gateway has counted goes on at its successor, and is added up with that of the others."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from everserve.gateway.observe.counted import Counted, decode
from everserve.ledger.shared import SharedTable
from everserve.tables.ids import Rank
from tests.support.gateway_toy import ToyServer, settle, toy_server

_SCRIPT = lambda spec: [50, 51, 52]  # noqa: E731
Counters = dict[tuple[str, frozenset[tuple[str, str]]], float]


def counters(server: ToyServer) -> Counters:
    families = list(text_string_to_metric_families(server.metrics_text()))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


def total(counted: Counters, name: str) -> float:
    return sum(value for (found, _), value in counted.items() if found == name)


def with_servers(test: Callable[[ToyServer, ToyServer], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with toy_server(_SCRIPT) as one, toy_server(_SCRIPT) as other:
            await asyncio.wait_for(test(one, other), 60)

    asyncio.run(run())


async def ask(server: ToyServer, num: int) -> None:
    for _ in range(num):
        response = await server.post("/v1/completions", {"prompt": "abcd", "max_tokens": 3})
        assert response.status == 200
    await settle()


def left_by(server: ToyServer) -> Counted:
    counted = decode(server.gateway.counts.encoded())
    assert counted is not None
    return counted


def test_a_successor_goes_on_counting() -> None:
    async def test(before: ToyServer, successor: ToyServer) -> None:
        await ask(before, 2)
        shown = counters(before)
        successor.gateway.counts.go_on(left_by(before))
        now = counters(successor)
        assert {name for name, value in shown.items() if now.get(name, 0.0) < value} == set()
        await ask(successor, 1)
        assert total(shown, "vllm:generation_tokens_total") == 6
        assert total(counters(successor), "vllm:generation_tokens_total") == 9

    with_servers(test)


def test_the_first_gateway_shows_what_all_have_counted() -> None:
    async def test(first: ToyServer, second: ToyServer) -> None:
        await ask(first, 1)
        await ask(second, 2)
        first.gateway.counted_elsewhere = lambda: [left_by(second)]
        shown = counters(first)
        assert total(shown, "vllm:generation_tokens_total") == 9
        assert total(shown, "vllm:time_to_first_token_seconds_count") == 3
        assert total(shown, "http_requests_total") == 3
        assert first.gateway.fleet.engines[Rank(0)].num_generation_tokens == 3, "its own are what they were"

    with_servers(test)


def test_what_another_version_has_left_is_not_read() -> None:
    assert decode(None) is None
    assert decode(b"anything") is None


@pytest.fixture
def tables() -> Iterator[Callable[[], SharedTable]]:
    fd = SharedTable.create(num_gateways=2)
    yield lambda: SharedTable(fd, 1, 2)
    os.close(fd)


def test_what_was_saved_last_is_whole_whenever_a_gateway_dies(tables: Callable[[], SharedTable]) -> None:
    table = tables()
    assert table.saved(1) is None
    for counted in (b"one", b"two two", b"three"):
        table.save(counted)
        assert tables().saved(1) == counted
    successor = tables()
    at = successor._counted_at[1] + (successor._num_saved + 1 & 1) * (4 << 20)
    successor._memory[at : at + 30] = bytes(range(30))  # it had begun to write the next one
    assert tables().saved(1) == b"three"
    successor.save(b"four")
    assert tables().saved(1) == b"four" and tables().saved(0) is None
