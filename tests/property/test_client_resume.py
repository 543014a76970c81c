"""A client that loses its connection again and again, at any event, gets the stream that it would have had.

Each life is one request with some choices, options and a text; then connections that end when they like: noticed or
not, with events that were sent and never arrived. Meanwhile the worker advances, is slow to hear of cancellations, or
dies. All events that the client kept, put together, are those of a run that nothing disturbed.
"""

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from everserve.tables.requests import RequestSpec
from tests.support.examples import examples
from tests.support.gateway_toy import EOS, Response, ToyServer, byte_level_tokenizer, settle, toy_server

TOKENIZER = byte_level_tokenizer()
HEADERS = {"X-Request-Id": "mine"}
requests = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 12),
        "n": st.sampled_from([1, 1, 2, 3]),
        "stop": st.sampled_from([None, "the end", ["€", "nd a"], ["zz"]]),
        "include_stop_str_in_output": st.booleans(),
        "stream_options": st.sampled_from([None, {"include_usage": True}]),
        "return_token_ids": st.booleans(),
    }
)
kinds = st.one_of(
    st.fixed_dictionaries({"echo": st.booleans(), "logprobs": st.sampled_from([None, 0, 2])}),
    st.fixed_dictionaries({"messages": st.just([{"role": "user", "content": "hi"}]), "logprobs": st.booleans()}),
)
texts = st.sampled_from(["the end and the end", "a € and a b", f"short{EOS}", "thethethe and"])
connections = st.lists(
    st.fixed_dictionaries(
        {
            "num_steps": st.integers(0, 4),  # of the worker, before the connection is lost
            "num_kept": st.integers(0, 5),  # events that arrived, at most
            "is_noticed": st.booleans(),  # otherwise the next one must take over
            "num_late_steps": st.integers(0, 1),  # of a worker that has not heard of it
            "dies": st.sampled_from([False, False, True]),
        }
    ),
    max_size=8,
)

Events = list[tuple[int, str]]  # ids and data


class Client:
    """One client, which knows what it has."""

    def __init__(self, server: ToyServer, path: str, body: dict[str, Any]) -> None:
        self.server = server
        self.path = path
        self.body = body
        self.events: Events = []
        self.left: list[asyncio.Task[None]] = []

    async def connect(self, plan: dict[str, Any] | None) -> None:
        """One connection: up to its planned end, or to the end of the stream."""
        headers = {**HEADERS, "Last-Event-ID": str(self.events[-1][0])} if self.events else HEADERS
        task, answer, gone = self.server.begin("POST", self.path, self.body, headers)
        while not (task.done() or answer.status or self.server.gateway.fleet.num_streams):
            await asyncio.sleep(0.001)  # chats are rendered in another process
        if plan is not None:
            await self.advance(task, plan["num_steps"])
        while plan is None and not task.done():
            await self.advance(task, 1)
        while not read(answer) and not task.done():  # one that has nothing cannot come back
            await self.advance(task, 1)
        assert answer.status == 200, answer.body
        if plan is None or not read(answer):
            self.events += read(answer)
            return
        if self.events or plan["num_kept"]:
            self.events += read(answer)[: plan["num_kept"]]
        else:
            self.events += read(answer)[:1]
        if plan["is_noticed"]:
            gone.set()
        self.left.append(task)
        for _ in range(plan["num_late_steps"]):
            self.server.workers[-1].advance()
        if plan["dies"]:
            self.server.workers[-1].die()
            await self.server.add_worker(0, len(self.server.workers) + 1)

    async def advance(self, task: "asyncio.Task[None]", num_steps: int) -> None:
        for _ in range(num_steps):
            await settle()
            if task.done():
                return
            self.server.workers[-1].advance()
        await settle()


def read(answer: Response) -> Events:
    return list(zip(answer.event_ids, (json.dumps(event) for event in answer.events), strict=True))


def by_choice(events: Events) -> dict[int, list[Any]]:
    """The events of each choice, and those at the end; when each was made does not matter."""
    found: dict[int, list[Any]] = {}
    for _, data in events:
        event = json.loads(data)
        choices = event["choices"] if event != "[DONE]" else []
        if event != "[DONE]":
            event["created"] = 0
        found.setdefault(choices[0]["index"] if choices else -1, []).append(event)
    return found


async def run(request: dict[str, Any], kind: dict[str, Any], text: str, plans: list[dict[str, Any]]) -> Events:
    path = "/v1/chat/completions" if "messages" in kind else "/v1/completions"
    prompt = {} if "messages" in kind else {"prompt": "say"}
    tokens = TOKENIZER.encode(text).ids

    def script(spec: RequestSpec) -> list[int]:
        start = spec.params.seed % 3  # siblings say different things
        return (tokens[start:] + tokens * 3)[: spec.params.max_tokens]

    async with toy_server(script, is_paced=True) as server:
        client = Client(server, path, {**request, **kind, **prompt, "seed": 1, "stream": True})
        for plan in [*plans, None]:
            if not client.events or json.loads(client.events[-1][1]) != "[DONE]":
                await client.connect(plan)
        for task in client.left:
            await asyncio.wait({task}, timeout=5)
            assert task.done()
        assert server.gateway.num_requests == server.gateway.fleet.num_streams == 0
        assert server.gateway.keeper.num_suspended == 0
        return client.events


@examples(38)
@given(requests, kinds, texts, connections)
def test_a_broken_stream_is_the_stream(request, kind, text, plans):
    whole = asyncio.run(run(request, kind, text, []))
    parts = asyncio.run(run(request, kind, text, plans))
    assert [id for id, _ in parts] == list(range(len(whole)))
    assert by_choice(parts) == by_choice(whole)
