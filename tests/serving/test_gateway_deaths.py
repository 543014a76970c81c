"""The gateway dies again and again, and no client notices: every answer is the one that it would have been.

Clients of many kinds ask for answers that are known from a time without deaths. What may differ is what is random or
timed: ids, the time, and how many tokens of the prompt were in the cache.
"""

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from everserve.procs.local_server import LocalServer
from everserve.procs.process import children_of
from tests.support.cluster import get, wait_until
from tests.support.deaths import PROMPTS, REQUESTS, Deaths, name_of
from tests.support.raw_client import RawClient, post


@pytest.fixture(scope="module")
def deaths() -> Iterator[Deaths]:
    flags = ("--attention-workers", "2", "--expert-workers", "2", "--enable-chaos", "--max-model-len", "1024")
    with LocalServer("demo", *flags, "--detect-ms", "2000") as server:
        yield Deaths(server)


def test_no_client_notices(deaths: Deaths) -> None:
    deaths.run(num_deaths=12)


def test_no_client_notices_the_death_of_a_keeper(deaths: Deaths) -> None:
    """Its gateway lives, and gives everything to the next one."""
    deaths.begin_again()
    deaths.are_keepers = True
    try:
        deaths.run(num_deaths=3, num_raw=8)
    finally:
        deaths.are_keepers = False


@pytest.mark.parametrize("victim", ["heir", "supervisor", "follower"])
def test_another_death_while_a_keeper_is_followed(deaths: Deaths, victim: str) -> None:
    """The process that follows it, or the one that has started that, dies before it has anything; or it dies as soon
    as it has everything, before the supervisor has heard of its gateway."""
    body = {**REQUESTS[0][1], "max_tokens": 400, "prompt": PROMPTS[0]}

    async def test() -> None:
        client = await RawClient.connect(deaths.address, random.Random(0))
        await client.send([post("/v1/completions", body)])
        known = (await client.receive()).normal()
        await client.send([post("/v1/completions", body)])
        before = deaths.keeper()
        assert before is not None
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: set(deaths.keepers()) - {before}, timeout_s=60)
        (heir,) = set(deaths.keepers()) - {before}
        pids = {one["name"]: one["pid"] for one in get(deaths.server, "/cluster").json()["processes"]}
        while victim == "follower" and "es-gateway" not in map(name_of, children_of(heir)):
            pass
        os.kill(pids["supervisor"] if victim == "supervisor" else heir, signal.SIGKILL)
        assert (await client.receive()).normal() == known
        wait_until(
            lambda: deaths.keeper() not in (None, before, heir if victim != "supervisor" else None), timeout_s=60
        )
        await client.send([post("/v1/completions", body)])
        assert (await client.receive()).normal() == known
        await client.close()

    asyncio.run(test())


def test_a_gateway_that_is_stopped_is_replaced(deaths: Deaths) -> None:
    """It holds every connection, and would answer nothing."""
    which, (path, body) = 0, REQUESTS[0]

    async def test() -> None:
        client = await RawClient.connect(deaths.address, random.Random(0))
        await client.send([post(path, body)])
        known = (await client.receive()).normal()
        stopped = deaths.gateway()
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        await client.send([post(path, body)])
        assert (await client.receive()).normal() == known, which
        assert deaths.gateway() != stopped
        await client.close()

    asyncio.run(test())


def test_with_its_keeper_connections_end_and_streams_do_not(deaths: Deaths) -> None:
    """A client that comes back with the last event that it has gets the rest from another keeper's gateway."""
    body = {**REQUESTS[0][1], "max_tokens": 900, "prompt": PROMPTS[0]}

    async def connect() -> RawClient:
        """As soon as a server listens there, and answers."""
        return await RawClient.connect(deaths.address, random.Random(0))

    async def test() -> None:
        client = await connect()
        await client.send([post("/v1/completions", body, X_Request_Id="undisturbed")])
        known = (await client.receive()).body
        await client.send([post("/v1/completions", body, X_Request_Id="mine")])
        begun = await client.receive_events(20)
        before, gateway = deaths.keeper(), deaths.gateway()
        assert before is not None and gateway is not None
        for pid in (before, gateway):
            os.kill(pid, signal.SIGKILL)
        begun += await client.rest_of_events()
        client.abort()
        assert b"[DONE]" not in begun, "they died in the middle of the stream"
        last = begun.count(b"\n\n") - 1
        begun = b"".join(event + b"\n\n" for event in begun.split(b"\n\n")[:-1])
        client = await connect()
        await client.send([post("/v1/completions", body, X_Request_Id="mine", Last_Event_Id=str(last))])
        answer = await client.receive()
        assert answer.status == 200, answer.body
        assert answer.event_ids[0] == last + 1
        assert _texts(begun + answer.body) == _texts(known)
        await client.close()
        assert deaths.keeper() not in (None, before)

    asyncio.run(test())


@pytest.mark.parametrize("leaves_first", [True, False])
def test_who_comes_back_at_once_waits_for_what_is_read_again(deaths: Deaths, leaves_first: bool) -> None:
    """Its grammar takes the new gateway some time to compile."""
    body = {**REQUESTS[0][1], "max_tokens": 24}
    body |= {"ignore_eos": False, "guided_json": {"type": "array", "minItems": 5, "items": _large_schema()}}

    async def ask(name: str) -> RawClient:
        client = await RawClient.connect(deaths.address, random.Random(0))
        await client.send([post("/v1/completions", body, X_Request_Id=name)])
        return client

    async def test() -> None:
        known = (await (await ask(f"undisturbed-{leaves_first}")).receive()).body
        for number in range(4):
            name = f"mine-{leaves_first}-{number}"
            client, stopped = await ask(name), deaths.gateway()
            begun = await client.receive_events(2)
            assert stopped is not None
            if leaves_first:
                client.abort()
            os.kill(stopped, signal.SIGKILL)
            client.abort()
            begun, last = begun[: begun.rfind(b"\n\n") + 2], begun.count(b"\n\n") - 1
            client = await RawClient.connect(deaths.address, random.Random(0))
            await client.send([post("/v1/completions", body, X_Request_Id=name, Last_Event_Id=str(last))])
            answer = await client.receive()
            assert answer.status == 200, answer.body
            assert _texts(begun + answer.body) == _texts(known)
            await client.close()

    asyncio.run(test())


@pytest.mark.parametrize("num_more", [0, 3])
def test_the_rest_of_an_answer_goes_on_over_a_death(deaths: Deaths, num_more: int) -> None:
    """The gateway dies when it has begun to send the rest: its head alone, or some events, too."""
    body = {**REQUESTS[0][1], "max_tokens": 100}

    async def ask(name: str, **headers: str) -> RawClient:
        client = await RawClient.connect(deaths.address, random.Random(0))
        await client.send([post("/v1/completions", body, X_Request_Id=name, **headers)])
        return client

    async def num_sent(name: str) -> int:
        """It is said to who asks for what comes after an event that was never sent."""
        client = await ask(name, Last_Event_Id="99999")
        answer = await client.receive()
        assert answer.status == 400, answer.body
        await client.close()
        return int(answer.body.partition(b"has had ")[2].split()[0])

    async def test() -> None:
        known = _texts((await (await ask(f"whole-{num_more}")).receive()).body)
        for number in range(4):
            name = f"rest-{num_more}-{number}"
            client = await ask(name)
            await client.receive_events(5)
            client.abort()
            await asyncio.sleep(0.05)
            num = await num_sent(name)
            client, stopped = await ask(name, Last_Event_Id=str(num - 1)), deaths.gateway()
            assert stopped is not None
            begun = await client.receive_events(num_more)
            os.kill(stopped, signal.SIGKILL)
            rest = begun + await client.rest_of_events()
            assert _texts(rest) == known[num:], (num, rest[-300:])
            client.abort()

    asyncio.run(test())


@pytest.mark.parametrize("path", ["/cluster/live", "/events"])
def test_a_feed_ends_as_it_should(deaths: Deaths, path: str) -> None:
    """Its reader connects again, and is told everything."""

    async def test() -> None:
        for _ in range(2):
            client, gateway = await RawClient.connect(deaths.address, random.Random(0)), deaths.gateway()
            assert gateway is not None
            await client.send([f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()])
            assert not await client.receive_events(0)  # the head
            asyncio.get_running_loop().call_later(random.random() * 0.3, os.kill, gateway, signal.SIGKILL)
            assert b"".join([chunk async for chunk in client.chunks()])[-2:] in (b"\n\n", b"")
            await client.close()

    asyncio.run(test())


def _large_schema() -> dict[str, Any]:
    names = [f"{a}{b}" for a in "abcdef" for b in range(10)]
    return {"type": "object", "properties": {name: {"enum": names} for name in names}, "required": names}


def _texts(events: bytes) -> list[str]:
    parts = [part.rpartition(b"data: ")[2] for part in events.split(b"\n\n")[:-1]]
    return [json.loads(part)["choices"][0]["text"] for part in parts if part != b"[DONE]"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_client_notices_a_thousand_deaths(deaths: Deaths) -> None:
    deaths.begin_again()
    deaths.run(num_deaths=1000, num_raw=45, seed=1)  # with the other clients, 64 streams


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_client_notices_deaths_of_several_processes_at_once(deaths: Deaths) -> None:
    """In a third of all deaths of a gateway, another process dies in the same moment."""
    deaths.begin_again()
    deaths.takes_others = 0.33
    try:
        deaths.run(num_deaths=300, num_raw=45, seed=2)
    finally:
        deaths.takes_others = 0.0
    assert len(deaths.others) >= 5, deaths.others
