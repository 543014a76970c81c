"""Clients that lose their connection and come back for the rest of their stream."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from everserve.gateway.streams.resumable import Keeper
from everserve.tables.outputs import Output
from everserve.tables.requests import RequestSpec
from tests.support.gateway_toy import Response, ToyServer, byte_level_tokenizer, settle, toy_server, until

TOKENIZER = byte_level_tokenizer()
TEXT = "one two three four"
TOKENS = TOKENIZER.encode(TEXT, add_special_tokens=False).ids
BODY = {"prompt": "say", "max_tokens": len(TOKENS), "stream": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": len(TOKENS), "stream": True}


def script(spec: RequestSpec) -> list[int]:
    return TOKENS


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


def texts(*answers: Response) -> str:
    """The text of the first choice, over all connections."""
    events = [event for answer in answers for event in answer.events if event != "[DONE]"]
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
    return "".join(choice["text"] for choice in choices)


class Client:
    """One client with an id of its own, and its connections one after the other."""

    def __init__(self, server: ToyServer, id: str = "mine", path: str = "/v1/completions") -> None:
        self.server = server
        self.headers = {"X-Request-Id": id}
        self.path = path
        self.answers: list[Response] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.leave: Callable[[], None] = lambda: None

    def begin(self, body: Any = None, *, after: int | None = None, reads: bool = True) -> Response:
        headers = self.headers if after is None else {**self.headers, "Last-Event-ID": str(after)}
        task, answer, gone = self.server.begin("POST", self.path, body or BODY, headers, reads=reads)
        self.tasks.append(task)
        self.answers.append(answer)
        self.leave = gone.set
        return answer

    async def read(self, num_events: int, or_refused: bool = False) -> None:
        """Let the worker advance, token by token, until so many events have arrived on this connection."""
        while len(self.answers[-1].event_ids) < num_events and not (or_refused and self.tasks[-1].done()):
            self.server.worker.advance()
            await settle()

    async def lose_connection(self) -> None:
        self.leave()
        await asyncio.wait_for(self.tasks[-1], 5)

    async def finish(self) -> None:
        while not self.tasks[-1].done():
            self.server.worker.advance()
            await asyncio.sleep(0)


def metric(server: ToyServer, line: str) -> bool:
    return f"{line}\n" in server.metrics_text()


# -- the usual course ----------------------------------------------------------------------------


def test_only_streams_of_clients_with_ids_of_their_own_have_event_ids() -> None:
    async def test() -> None:
        async with toy_server(script) as server:
            plain = await server.post("/v1/completions", BODY)
            named = await server.request("POST", "/v1/completions", BODY, {"X-Request-Id": "mine"})
            assert plain.event_ids == [] and named.event_ids == list(range(len(TOKENS) + 1))
            assert named.body.startswith(b'id: 0\ndata: {"id":"cmpl-mine"')
            assert named.body.endswith(b"\n\nid: %d\ndata: [DONE]\n\n" % len(TOKENS))
            assert texts(plain) == texts(named) == TEXT
            whole = await server.request("POST", "/v1/completions", {**BODY, "stream": False}, {"X-Request-Id": "x"})
            assert whole.json["choices"][0]["text"] == TEXT

    run(test)


@pytest.mark.parametrize(
    ("accept", "has_ids"),
    [
        (None, True),
        ("*/*", True),
        ("application/json", True),  # what OpenAI's client sends, for streams too
        ("text/event-stream", True),
        ("application/json, text/event-stream;ids=no", False),
        ("Text/Event-Stream; q=1; ids=no", False),
        ("application/json;ids=no", True),
        ("", True),
    ],
)
@pytest.mark.parametrize("id", ["mine", "bench-1a2b3c4d-0"])
def test_clients_that_read_data_lines_only_say_so(accept: str | None, has_ids: bool, id: str) -> None:
    """Accept decides; how a client calls its requests does not."""

    async def test() -> None:
        async with toy_server(script) as server:
            headers = {"X-Request-Id": id} | ({"Accept": accept} if accept is not None else {})
            answer = await server.request("POST", "/v1/completions", BODY, headers)
            assert bool(answer.event_ids) == has_ids and texts(answer) == TEXT
            assert not has_ids or answer.event_ids == list(range(len(TOKENS) + 1))
            again = await server.request("POST", "/v1/completions", BODY, headers | {"Last-Event-ID": "0"})
            assert again.status == (200 if has_ids else 404), "without ids nothing is kept"

    run(test)


def test_each_event_of_a_chat_has_an_id_the_usage_and_the_end_too() -> None:
    async def test() -> None:
        async with toy_server(script) as server:
            body = {**CHAT, "stream_options": {"include_usage": True}}
            answer = await server.request("POST", "/v1/chat/completions", body, {"X-Request-Id": "mine"})
            first, *_, usage, done = answer.events
            assert first["choices"][0]["delta"]["role"] == "assistant"
            assert usage["usage"]["completion_tokens"] == len(TOKENS) and done == "[DONE]"
            assert answer.event_ids == list(range(1 + len(TOKENS) + 2))

    run(test)


def test_a_stream_goes_on_where_its_client_left_off() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            client = Client(server)
            first = client.begin()
            await client.read(3)
            assert server.gateway.num_requests == 1
            await client.lose_connection()
            await until(lambda: len(server.worker.cancelled) == 1)
            assert server.gateway.num_requests == 0 and server.gateway.fleet.num_streams == 0
            assert server.gateway.keeper.num_suspended == 1 and metric(server, "everserve_suspended_streams 1.0")
            again = client.begin(b"not even JSON", after=2)
            await until(lambda: again.status == 200)  # before there is a token
            await until(lambda: len(server.worker.specs) == 2)
            old, new = server.worker.specs
            assert list(new.known) == TOKENS[:3] and new.id != old.id
            assert (new.prompt, new.params) == (old.prompt, old.params)
            server.worker.send(Output(id=old.id, index=3, token=TOKENS[5]))  # it had not heard of the cancellation
            await client.finish()
            assert first.event_ids == [0, 1, 2] and again.event_ids == list(range(3, len(TOKENS) + 1))
            assert texts(first, again) == TEXT and again.headers["content-type"].startswith("text/event-stream")
            assert again.headers["x-request-id"] == "mine"
            assert metric(server, "everserve_client_resumes_total 1.0")
            assert metric(server, "everserve_suspended_streams 0.0")
            task, feed, gone = server.begin("GET", "/events")
            await until(lambda: b'"request_id":"","after_event":2,"away_s":' in feed.body)  # no key says whose id it is
            gone.set()
            await task

    run(test)


def test_what_was_lost_on_its_way_is_sent_again() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            client = Client(server)
            client.begin()
            await client.read(8)
            await client.lose_connection()
            rest = client.begin(after=1)
            await until(lambda: len(rest.event_ids) == 6)
            assert rest.event_ids == [2, 3, 4, 5, 6, 7], "from memory; nothing was computed yet"
            await client.lose_connection()
            rest = client.begin(after=5)
            await client.finish()
            assert rest.event_ids == list(range(6, len(TOKENS) + 1))

    run(test)


def test_the_end_of_a_stream_can_be_had_again() -> None:
    async def test() -> None:
        async with toy_server(script) as server:
            client = Client(server)
            whole = client.begin()
            await client.finish()
            last = len(TOKENS)
            for after in (0, last - 2, 5, last):
                rest = client.begin(after=after)
                await client.finish()
                assert rest.event_ids == list(range(after + 1, last + 1))
                assert rest.is_complete and whole.body.endswith(rest.body)
            assert len(server.worker.specs) == 1, "nothing is generated twice"
            assert server.gateway.num_requests == 0

    run(test)


def test_choices_that_have_ended_are_not_resumed() -> None:
    async def test() -> None:
        async with toy_server() as server:
            client = Client(server)
            answer = client.begin({**BODY, "n": 2})
            await until(lambda: len(server.worker.specs) == 2)
            a, b = (spec.id for spec in server.worker.specs)
            server.worker.send(Output(id=a, index=0, token=TOKENS[0], finish_reason="stop"))
            server.worker.send(Output(id=b, index=0, token=TOKENS[0]))
            await until(lambda: len(answer.event_ids) == 2)
            await client.lose_connection()
            assert server.gateway.keeper.num_suspended == 1
            await until(lambda: server.worker.cancelled == [b])
            rest = client.begin(after=1)
            await until(lambda: len(server.worker.specs) == 3)
            last = server.worker.specs[2]
            server.worker.send(Output(id=last.id, index=1, token=TOKENS[1], finish_reason="length"))
            await client.finish()
            assert [event if event == "[DONE]" else event["choices"][0]["index"] for event in rest.events] == [
                1,
                "[DONE]",
            ]

    run(test)


def test_a_client_that_comes_back_while_its_worker_is_dead_waits_like_others() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            client = Client(server)
            first = client.begin()
            await client.read(3)
            await client.lose_connection()
            server.worker.die()
            await until(lambda: not server.gateway.fleet.ready_links())
            rest = client.begin(after=2)
            await until(lambda: rest.status == 200)
            assert server.gateway.fleet.num_waiting == 1
            server.workers.clear()
            await server.add_worker(0, 2)
            await client.finish()
            assert texts(first, rest) == TEXT

    run(test)


def test_a_full_queue_does_not_keep_out_who_was_in() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True, max_queue=2) as server:
            client = Client(server)
            client.begin()
            await client.read(2)
            await client.lose_connection()
            others = [Client(server, f"other-{i}") for i in range(2)]
            for other in others:
                other.begin()
            await until(lambda: server.gateway.fleet.num_streams == 2)
            assert (await server.post("/v1/completions", BODY)).status == 503
            rest = client.begin(after=1)
            await client.finish()
            assert rest.status == 200 and rest.events[-1] == "[DONE]"
            for other in others:
                await other.finish()

    run(test)


def test_time_away_is_no_latency() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            fleet = server.gateway.fleet
            clock, away_s = fleet.clock, 0.0
            fleet.clock = lambda: clock() + away_s
            client = Client(server)
            client.begin()
            await client.read(3)
            await client.lose_connection()
            away_s = 50.0
            client.begin(after=2)
            await client.finish()
            (engine,) = fleet.engines.values()
            measured = (engine.inter_token_latency_s, engine.latency_s, engine.decode_s, engine.mean_token_s)
            assert all(0 < histogram.total < 50.0 for histogram in measured)

    run(test)


# -- connections that only look alive ------------------------------------------------------------


@pytest.mark.parametrize("reads", [True, False])
def test_a_new_connection_takes_over_from_one_that_looks_alive(reads: bool) -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            client = Client(server)
            first = client.begin(reads=reads)
            await client.read(1)
            for _ in range(3):
                server.worker.advance()
            await until(lambda: server.gateway.fleet.engines[0].num_generation_tokens == 4)
            rest = client.begin(after=0)
            await until(client.tasks[0].done)
            assert client.tasks[0].cancelled() and not first.is_complete, "uvicorn closes it"
            assert server.gateway.num_requests == 1
            await client.finish()
            assert rest.event_ids == list(range(1, len(TOKENS) + 1))
            assert server.worker.cancelled == [] and len(server.worker.specs) == 1, "the stream went on meanwhile"
            assert server.gateway.num_requests == 0

    run(test)


def test_the_end_of_a_connection_that_was_taken_over_means_nothing() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            client = Client(server)
            client.begin()
            await client.read(2)
            leave_first = client.leave
            rest = client.begin(after=1)
            leave_first()
            await client.finish()
            assert rest.events[-1] == "[DONE]" and server.worker.cancelled == []

    run(test)


def test_a_client_that_does_not_read_is_suspended() -> None:
    async def test() -> None:
        async with toy_server() as server:
            client = Client(server)
            client.begin(reads=False)
            await until(lambda: len(server.worker.specs) == 1)
            id = server.worker.specs[0].id
            for start in range(0, 100_000, 1000):
                server.worker.send(*(Output(id=id, index=start + i, token=50) for i in range(1000)))
                await until(lambda: server.worker.channel.channel.wants_write is False)
            await until(client.tasks[0].done)
            await until(lambda: server.worker.cancelled == [id])
            assert server.gateway.keeper.num_suspended == 1 and server.gateway.num_requests == 0
            rest = client.begin(after=0)
            await until(lambda: len(server.worker.specs) == 2)
            resumed = server.worker.specs[1]
            await until(lambda: rest.body.count(b"\n\n") == len(resumed.known) - 1)
            await client.lose_connection()

    run(test)


# -- who may not come back -----------------------------------------------------------------------


@pytest.mark.parametrize("last", ["", "abc", "-1", "1.0", "+1", " 1 2", "²", "1" * 30, "3", "999"])
def test_events_that_were_never_sent(last: str) -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            client = Client(server)
            client.begin()
            await client.read(3)
            await client.lose_connection()
            answer = await server.request("POST", client.path, BODY, {**client.headers, "Last-Event-ID": last})
            assert answer.status == 400 and answer.error["param"] == "Last-Event-ID"
            rest = client.begin(after=2)  # it did no harm
            await client.finish()
            assert rest.events[-1] == "[DONE]"

    run(test)


def test_streams_that_are_not_kept() -> None:
    async def test() -> None:
        async with toy_server(script) as server:
            unknown = await server.request(
                "POST", "/v1/completions", BODY, {"X-Request-Id": "nobody", "Last-Event-ID": "0"}
            )
            assert unknown.status == 404 and "60 s" in unknown.error["message"]
            unnamed = await server.request("POST", "/v1/completions", BODY, {"Last-Event-ID": "0"})
            assert unnamed.status == 400 and unnamed.error["param"] == "X-Request-Id"
            headers = {"X-Request-Id": "whole"}
            await server.request("POST", "/v1/completions", {**BODY, "stream": False}, headers)
            whole = await server.request("POST", "/v1/completions", BODY, {**headers, "Last-Event-ID": "0"})
            assert whole.status == 404
            assert len(server.worker.specs) == 1, "coming back never begins a generation"

    run(test)


def test_a_stream_belongs_to_its_endpoint() -> None:
    async def test() -> None:
        async with toy_server(script) as server:
            client = Client(server)
            client.begin()
            await client.finish()
            other = Client(server, path="/v1/chat/completions")
            answer = other.begin(after=0)
            await other.finish()
            assert answer.status == 409 and "/v1/completions" in answer.error["message"]
            answer = other.begin(CHAT)  # the same name elsewhere is another name
            await other.finish()
            for each in (client, other):
                rest = each.begin(after=1)
                await each.finish()
                assert rest.status == 200 and rest.event_ids[0] == 2

    run(test)


def test_coming_back_needs_a_key_too() -> None:
    async def test() -> None:
        async with toy_server(script, api_keys=["k"]) as server:
            client = Client(server)
            client.headers["Authorization"] = "Bearer k"
            client.begin()
            await client.finish()
            rest = client.begin(after=0)
            await client.finish()
            assert rest.status == 200
            client.headers["Authorization"] = "Bearer other"
            rest = client.begin(after=0)
            await client.finish()
            assert rest.status == 401

    run(test)


def test_nothing_is_kept_if_that_is_off() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True, resume_window_s=0.0) as server:
            client = Client(server)
            answer = client.begin()
            while not answer.body:
                server.worker.advance()
                await asyncio.sleep(0)
            assert answer.event_ids == []
            await client.lose_connection()
            assert server.gateway.fleet.num_streams == 0 and metric(server, "everserve_suspended_streams 0.0")
            rest = client.begin(after=0)
            await client.finish()
            assert rest.status == 404 and "--resume-window" in rest.error["message"]
            assert len(server.worker.specs) == 1

    run(test)


def test_who_stays_away_too_long_is_forgotten() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True, resume_window_s=0.01) as server:
            keeper = server.gateway.keeper
            client, ended = Client(server), Client(server, "ended")
            client.begin()
            await client.read(3)
            await client.lose_connection()
            ended.begin()
            await ended.finish()
            await until(lambda: keeper.num_bytes == 0)
            assert metric(server, 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="toy"} 1.0')
            for each in (client, ended):
                rest = each.begin(after=0)
                await each.finish()
                assert rest.status == 404 and "0.01 s" in rest.error["message"]

    run(test)


def test_a_client_without_an_event_cannot_come_back() -> None:
    async def test() -> None:
        async with toy_server() as server:
            client = Client(server)
            client.begin()
            await until(lambda: len(server.worker.specs) == 1)
            await client.lose_connection()
            await until(lambda: len(server.worker.cancelled) == 1)
            keeper = server.gateway.keeper
            assert (keeper.num_bytes, keeper.num_suspended) == (0, 0)

    run(test)


def test_a_request_that_could_not_begin_is_not_kept() -> None:
    async def test() -> None:
        async with toy_server(max_queue=1) as server:
            client, second = Client(server), Client(server, "second")
            rejected = client.begin()
            await until(lambda: len(server.worker.specs) == 1)
            busy = second.begin()
            await second.finish()
            server.worker.reject(server.worker.specs[0].id, "no", False)
            await client.finish()
            assert (rejected.status, busy.status) == (400, 503)
            assert server.gateway.keeper.num_bytes == 0

    run(test)


def test_a_stream_that_broke_is_broken_for_those_who_come_back_too() -> None:
    async def test() -> None:
        async with toy_server() as server:
            client = Client(server)
            first = client.begin({**BODY, "n": 2})
            await until(lambda: len(server.worker.specs) == 2)
            a, b = (spec.id for spec in server.worker.specs)
            server.worker.send(Output(id=a, index=0, token=50), Output(id=a, index=5, token=50))
            await client.finish()
            assert first.event_ids == [0, 1] and "error" in first.events[1]
            await until(lambda: sorted(server.worker.cancelled) == [a, b])
            rest = client.begin(after=0)
            await client.finish()
            assert rest.event_ids == [1] and rest.events == first.events[1:] and rest.is_complete

    run(test)


# -- names that are used again -------------------------------------------------------------------


def test_a_new_request_of_the_same_name_replaces_one_whose_client_is_away() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            client = Client(server)
            client.begin()
            await client.read(3)
            await client.lose_connection()
            answer = client.begin()
            await client.read(1)
            assert server.gateway.keeper.num_suspended == 0 and len(server.worker.specs) == 2
            assert metric(server, 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="toy"} 1.0')
            await client.finish()
            assert texts(answer) == TEXT and answer.event_ids[0] == 0

    run(test)


def test_a_new_request_of_the_same_name_does_no_harm_to_one_whose_client_is_there() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            old, new = Client(server), Client(server)
            first = old.begin()
            await old.read(3)
            second = new.begin()
            await new.read(1)
            await old.finish()
            await new.finish()
            assert texts(first) == texts(second) == TEXT
            assert first.event_ids == second.event_ids == list(range(len(TOKENS) + 1))
            rest = new.begin(after=3)
            await new.finish()
            assert len(rest.event_ids) == len(TOKENS) - 3

    run(test)


def test_one_whose_name_was_taken_ends_with_its_connection() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            old, new = Client(server), Client(server)
            old.begin()
            await old.read(3)
            new.begin()
            await new.read(1)
            await old.lose_connection()
            await until(lambda: server.worker.cancelled == [server.worker.specs[0].id])
            assert server.gateway.keeper.num_suspended == 0
            await new.finish()

    run(test)


# -- limits --------------------------------------------------------------------------------------


def test_memory_is_short_who_is_away_longest_is_forgotten_first() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            gateway = server.gateway
            gateway.keeper = Keeper(60.0, gateway.fleet.tell, max_bytes=30_000)
            away = [Client(server, f"away-{i}") for i in range(3)]
            for client in away:
                client.begin()
                await client.read(3)
            for client in away[::-1]:
                await client.lose_connection()
            assert gateway.keeper.num_suspended == 2, "the first one that left has made room"
            assert gateway.keeper.num_bytes <= 30_000 and gateway.keeper.num_evicted["suspended"] == 1
            statuses = []
            for client in away:
                answer = client.begin(after=2)
                await client.finish()
                statuses.append(answer.status)
            assert statuses == [200, 200, 404]
            await until(lambda: len(server.worker.cancelled) == 3)

    run(test)


def test_memory_is_short_the_largest_goes_on_without_being_kept() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            gateway = server.gateway
            gateway.keeper = Keeper(60.0, gateway.fleet.tell, max_bytes=5000)
            large, small = Client(server, "large"), Client(server, "small")
            whole = large.begin()
            await large.read(5)
            small.begin({**BODY, "max_tokens": 8})
            await large.finish()
            await small.finish()
            assert texts(whole) == TEXT and whole.event_ids == list(range(len(TOKENS) + 1))
            assert 0 < gateway.keeper.num_bytes <= 5000
            gone, rest = large.begin(after=3), small.begin(after=3)
            await large.finish()
            await small.finish()
            assert (gone.status, rest.status) == (404, 200)
            assert gateway.keeper.num_evicted == {"ended": 0, "live": 1, "suspended": 0}

    run(test)


def test_memory_is_short_streams_that_have_ended_make_room_for_those_whose_clients_are_away() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            gateway = server.gateway
            gateway.keeper = Keeper(60.0, gateway.fleet.tell, max_bytes=20_000)
            away = Client(server, "away")
            away.begin()
            await away.read(3)
            await away.lose_connection()
            for i in range(10):
                other = Client(server, f"ended-{i}")
                other.begin({**BODY, "max_tokens": 8})
                await other.finish()
            assert gateway.keeper.num_suspended == 1 and gateway.keeper.num_bytes <= 20_000
            num_evicted = gateway.keeper.num_evicted["ended"]
            assert num_evicted > 0 and metric(
                server, f'everserve_resume_evictions_total{{state="ended"}} {num_evicted}.0'
            )
            assert metric(server, 'everserve_resume_evictions_total{state="suspended"} 0.0')
            rest = away.begin(after=2)
            await away.finish()
            assert rest.status == 200 and texts(*away.answers) == TEXT

    run(test)


def test_while_shutting_down_nobody_is_kept() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True) as server:
            away, here = Client(server, "away"), Client(server, "here")
            away.begin()
            await away.read(3)
            await away.lose_connection()
            here.begin()
            await here.read(3)
            server.gateway.keeper.close()
            keeper = server.gateway.keeper
            assert (keeper.num_bytes, keeper.num_suspended) == (0, 0)
            await here.read(5)
            await here.lose_connection()
            await until(lambda: len(server.worker.cancelled) == 2)
            assert (keeper.num_bytes, keeper.num_suspended, server.gateway.fleet.num_streams) == (0, 0, 0)
            late = Client(server, "late")
            answer = late.begin()
            await late.finish()
            assert answer.event_ids == [] and texts(answer) == TEXT

    run(test)


def test_nothing_is_left_behind() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True, resume_window_s=0.2) as server:
            clients = [Client(server, f"client-{i}") for i in range(5)]
            for client in clients:
                client.begin({**BODY, "n": 2})
                await client.read(4)
                await client.lose_connection()
                client.begin(after=1)
                await client.read(4, or_refused=True)  # on a busy machine the window may be over
                await client.lose_connection()
            await until(lambda: server.gateway.keeper.num_bytes == 0)
            assert server.gateway.keeper.num_suspended == server.gateway.fleet.num_streams == 0

    run(test)
