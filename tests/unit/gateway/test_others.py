"""Two gateways give streams to the same workers."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from everserve.errors import OverloadedError
from everserve.gateway.streams.others import SharedOthers
from everserve.ledger.shared import SharedTable
from tests.support.fleet_toy import CAPACITY, ToyFleet, assert_complete


def with_two(test: Callable[[ToyFleet, ToyFleet], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run() -> None:
        fd = SharedTable.create(num_gateways=2)
        tables = [SharedTable(fd, number, 2) for number in range(2)]
        toys = [ToyFleet(others=SharedOthers(table, ["", "key1"]), **options) for table in tables]
        for table in tables:
            table.serves = True
        try:
            await asyncio.wait_for(test(*toys), 30)
        finally:
            for toy in toys:
                await toy.close()
            os.close(fd)

    asyncio.run(run())


async def until(condition: Callable[[], object], *toys: ToyFleet) -> None:
    while not condition():
        await asyncio.sleep(0.001)
        for toy in toys:
            await toy.settle()


def test_what_one_has_given_is_no_room_for_the_other() -> None:
    async def test(a: ToyFleet, b: ToyFleet) -> None:
        ours, theirs = await a.join(0), await b.join(0)
        a.submit(n=CAPACITY - 1)
        await a.settle()
        b.submit(n=3)
        await b.settle()
        assert (len(ours.specs), len(theirs.specs), b.fleet.num_waiting) == (CAPACITY - 1, 1, 2)
        await a.run(ours)  # they end, and the other gateway is not told
        await until(lambda: not b.fleet.num_waiting, b)
        await b.run(theirs)
        assert_complete(a)
        assert_complete(b)

    with_two(test)


def test_a_place_is_for_the_stream_that_came_first() -> None:
    async def test(a: ToyFleet, b: ToyFleet) -> None:
        ours, theirs = await a.join(0), await b.join(0)
        for _ in range(CAPACITY):
            b.submit(max_tokens=2)
        await b.settle()
        a.submit()
        b.now_s += 1.0
        a.now_s += 1.0
        b.submit()
        await until(lambda: a.fleet.num_waiting == b.fleet.num_waiting == 1, a, b)
        theirs.step("s0")
        theirs.step("s0")
        await b.settle()
        assert b.fleet.num_waiting == 1, "it hears first that there is a place, and leaves it"
        await until(lambda: ours.specs, a)
        assert b.fleet.num_waiting == 1

    with_two(test)


def test_a_key_has_its_limit_over_all() -> None:
    async def test(a: ToyFleet, b: ToyFleet) -> None:
        await a.join(0)
        await b.join(0)
        a.submit(n=4, key="key1")
        b.fleet.check_room(1, "key1")
        with pytest.raises(OverloadedError, match="4 of 5 places"):
            b.fleet.check_room(2, "key1")
        b.fleet.check_room(5, "")

    with_two(test, max_queue=5)
