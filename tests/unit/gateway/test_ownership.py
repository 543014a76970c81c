"""A stream belongs to the key that began it, and no other client hears of its id."""

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest

from everserve.gateway.http.access import audience, request_label, seen_by, stream_name
from everserve.tables.requests import RequestSpec
from tests.support.gateway_toy import Response, ToyServer, byte_level_tokenizer, settle, toy_server, until

TOKENS = byte_level_tokenizer().encode("one two three four", add_special_tokens=False).ids
BODY = {"prompt": "say", "max_tokens": len(TOKENS), "stream": True}
PATHS = ("/v1/completions", "/v1/chat/completions")
A, B, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("key-a", "key-b", "key-admin"))
KEYS = {"api_keys": ["key-a", "key-b"], "admin_key": "key-admin"}


def script(spec: RequestSpec) -> list[int]:
    return TOKENS


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


async def begin(server: ToyServer, key: dict[str, str], id: str, num_events: int = 3) -> Response:
    """A stream of this key that has had some events and goes on."""
    headers = {**key, "X-Request-Id": id}
    _, answer, _ = server.begin("POST", PATHS[0], BODY, headers)
    while len(answer.event_ids) < num_events:
        server.worker.advance()
        await settle()
    return answer


async def come_back(server: ToyServer, key: dict[str, str], id: str, path: str = PATHS[0]) -> Response:
    return await server.request("POST", path, BODY, {**key, "X-Request-Id": id, "Last-Event-ID": "1"})


async def events(server: ToyServer, key: dict[str, str], path: str = "/events") -> str:
    """What a reader with this key is sent at once."""
    task, answer, gone = server.begin("GET", path, headers=key)
    await until(lambda: bool(answer.body))
    gone.set()
    await task
    return answer.body.decode()


def test_another_key_does_not_get_a_stream_and_does_not_end_it() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True, **KEYS) as server:
            mine = await begin(server, A, "mine")
            for key in (B, ADMIN):
                for path in PATHS:  # nor does the answer of the other endpoint tell that there is one
                    taken = await come_back(server, key, "mine", path)
                    never = await come_back(server, key, "never-was", path)
                    assert taken.status == 404 and taken.body == never.body
            while not mine.is_complete:
                server.worker.advance()
                await settle()
            assert mine.events[-1] == "[DONE]" and mine.event_ids == list(range(len(TOKENS) + 1))
            again = await come_back(server, A, "mine")  # its own key still does
            assert again.status == 200 and again.event_ids == list(range(2, len(TOKENS) + 1))
            assert (await come_back(server, A, "mine", PATHS[1])).status == 409

    run(test)


def test_the_same_id_with_two_keys_is_two_streams() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True, **KEYS) as server:
            first, second = await begin(server, A, "same"), await begin(server, B, "same")
            while not (first.is_complete and second.is_complete):
                server.worker.advance()
                await settle()
            for key in (A, B):
                assert (await come_back(server, key, "same")).status == 200
            assert (await come_back(server, ADMIN, "same")).status == 404

    run(test)


async def make_events(server: ToyServer, keys: list[dict[str, str]], ids: list[str]) -> None:
    """Streams of each key that move to another worker, and whose clients come back for them."""
    for key, id in zip(keys, ids, strict=True):
        await begin(server, key, id)
    unnamed, _, gone = server.begin("POST", PATHS[0], BODY, keys[0])
    await until(lambda: len(server.worker.specs) == len(ids) + 1)
    server.attach(1).say_ready()
    server.worker.give_back()
    await until(lambda: server.gateway.fleet.totals.num_moved == len(ids) + 1)
    gone.set()
    await unnamed
    for key, id in zip(keys, ids, strict=True):
        headers = {**key, "X-Request-Id": id, "Last-Event-ID": "0"}
        _, answer, _ = server.begin("POST", PATHS[0], BODY, headers)
        await until(lambda answer=answer: answer.status == 200)


def test_events_show_the_ids_of_their_readers_requests_only() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True, **KEYS) as server:
            await make_events(server, [A, B], ["chosen-by-a", "chosen-by-b"])
            for reader, own in ((A, "chosen-by-a"), (B, "chosen-by-b"), (ADMIN, None)):
                told = await events(server, reader)
                assert told.count("event: stream_moved") == 3 and told.count("event: client_resumed") == 2
                assert re.search(r'"request_id":"stream-[12]"', told), "streams of others can be told apart"
                for id in ("chosen-by-a", "chosen-by-b"):
                    assert (id in told) == (id == own)
                assert "@" not in told
            assert "chosen-by" not in await events(server, B, "/cluster/live") + await events(server, A, "/cluster")
            unnamed = server.worker.specs[-1].id.split(".")[0]
            assert unnamed in await events(server, A) and unnamed not in await events(server, B)

    run(test)


def test_without_keys_ids_that_clients_chose_are_shown_to_no_reader() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            await make_events(server, [{}, {}], ["chosen-1", "chosen-2"])
            for headers in ({}, A):
                told = await events(server, headers)
                assert told.count("event: stream_moved") == 3 and told.count("event: client_resumed") == 2
                assert "chosen" not in told and "stream-1" in told
            assert server.worker.specs[-1].id.split(".")[0] in told, "the gateway's own id tells nothing"
            assert "chosen" not in await events(server, {}, "/cluster/live")

    run(test)


@pytest.mark.parametrize("id", ["plain", "a@key2", "a.7@", "@", "x@-"])
def test_names_of_streams(id: str) -> None:
    """Whatever a client writes into its id: it is seen by its own key only."""
    name = stream_name(f"cmpl-{id}-0", 17, audience("key1", is_chosen=True))
    assert seen_by(name, "key1") == f"cmpl-{id}-0.17"
    for reader in ("key2", "", "-", "admin"):
        assert seen_by(name, reader) == "stream-17"
    hidden = request_label(id, audience("", is_chosen=True))
    assert seen_by(hidden, "") == ""


def test_what_a_wrong_key_is_told() -> None:
    async def test() -> None:
        async with toy_server(script, **KEYS) as server:
            for given, words in (({}, "didn't provide"), ({"Authorization": "Bearer wrong"}, "Incorrect API key")):
                answer = await server.request("GET", "/cluster", headers=given)
                assert answer.status == 401 and words in answer.error["message"]
            for given in ("key-a", "Basic key-a", "Bearer key-a2", "Bearer key-", "Bearer ", "Bearer"):
                assert (await server.request("GET", "/cluster", headers={"Authorization": given})).status == 401
            for good in (A, B, ADMIN, {"Authorization": "bearer  key-a "}):
                assert (await server.request("GET", "/cluster", headers=good)).status == 200

    run(test)
