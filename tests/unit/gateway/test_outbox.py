"""Who writes events: plain ones are poured into the connection, all others wake the task of the answer."""

import asyncio
from collections.abc import Awaitable, Callable

from everserve.gateway.http.slices import Slices
from everserve.gateway.http.sse import LargeEvent
from everserve.gateway.streams.outbox import Outbox


class Client:
    """One that reads, or not; and the task that writes to it what is not poured."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.reads, self.is_cut, self.fails = True, False, False
        self.poured: list[bytes] = []
        self.by_task: list[bytes] = []
        self.task = asyncio.ensure_future(self._write())
        self.outbox.attach(self.task, self._cut)
        self.outbox.pour_by(self._pour)

    async def _write(self) -> None:
        is_last = False
        while not is_last and await self.outbox.ready():
            await self.outbox.encode_large(Slices())
            self.by_task.append(self.outbox.take())
            is_last = self.outbox.is_empty

    def _pour(self) -> bool:
        if self.fails:
            raise OSError
        if self.reads:
            self.poured.append(self.outbox.take())
        return self.reads

    def _cut(self) -> None:
        self.is_cut = True


def run(test: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        client = Client()
        await turns()
        await test(client)
        client.task.cancel()

    asyncio.run(main())


async def turns() -> None:
    """As many turns of the loop as anything here needs."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_plain_events_of_a_turn_are_poured_together() -> None:
    async def test(client: Client) -> None:
        client.outbox.put([b"a"])
        client.outbox.put([b"b", b"c"])
        assert client.poured == []
        await turns()
        client.outbox.put([b"d"])
        await turns()
        assert client.poured == [b"abc", b"d"] and client.by_task == []
        assert client.outbox.num_taken == 4

    run(test)


def test_the_last_events_are_written_by_the_task() -> None:
    async def test(client: Client) -> None:
        client.outbox.put([b"a"])
        client.outbox.finish()
        await client.task
        assert client.poured == [] and client.by_task == [b"a"]

    run(test)


def test_events_before_the_end_are_written_once() -> None:
    """They were to be poured when it came."""

    async def test(client: Client) -> None:
        client.outbox.put([b"a"])
        await asyncio.sleep(0)
        client.outbox.put([b"b"])
        client.outbox.finish()
        await client.task
        assert client.poured + client.by_task == [b"a", b"b"]

    run(test)


def test_a_client_that_does_not_read_has_its_task_wait() -> None:
    async def test(client: Client) -> None:
        client.reads = False
        client.outbox.put([b"a"])
        await turns()
        client.reads = True
        client.outbox.put([b"b"])
        await turns()
        assert client.by_task == [b"a"] and client.poured == [b"b"]

    run(test)


def test_a_large_event_is_written_by_the_task_and_what_is_behind_it_later() -> None:
    async def test(client: Client) -> None:
        client.outbox.put([b"a", LargeEvent(lambda: iter([b"large"])), b"b"])
        await turns()
        assert client.poured == []
        client.outbox.finish()
        await client.task
        assert b"".join(client.by_task) == b"adata: large\n\nb"

    run(test)


def test_what_cannot_be_poured_cuts_the_connection() -> None:
    """Events that were taken may be missing in it."""

    async def test(client: Client) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        client.fails = True
        client.outbox.put([b"a"])
        await turns()
        assert client.is_cut

    run(test)


def test_a_newer_task_pours_only_once_it_has_begun() -> None:
    """Its head is to be written first."""

    async def test(client: Client) -> None:
        newer = asyncio.ensure_future(asyncio.sleep(60))
        client.outbox.put([b"a"])
        client.outbox.attach(newer)
        await turns()
        assert client.poured == [] and client.outbox.take() == b"a"
        newer.cancel()

    run(test)
