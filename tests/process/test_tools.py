"""Calls of tools with the real `openai` package, also while workers die: the same calls, and valid by their schemas."""

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from everserve.procs.local_server import LocalServer
from tests.support import cluster as c
from tests.support.cluster import Fault
from tests.support.shared_servers import TOOLS, SharedServers

MESSAGES: Any = [{"role": "user", "content": "What is the weather like?"}]


@pytest.fixture(scope="module")
def shared(shared_servers: SharedServers) -> Iterator[LocalServer]:
    """The one of tests/clients too."""
    with shared_servers.lend(*TOOLS) as server:
        yield server


def tool(name: str, strict: bool, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": f"Says {name}", "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


CITY, DAYS = (
    {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 9, "maxItems": 9},
)
WEATHER, CLOCK = tool("weather", False, city=CITY, days=DAYS), tool("clock", True, city=CITY)


class Weather(pydantic.BaseModel):
    """Says the weather."""

    city: str = pydantic.Field(pattern="^[A-Z][a-z]{2,9}$")
    days: list[Literal[1, 2, 3]] = pydantic.Field(max_length=3)


def asked(server: Any, **fields: Any) -> dict[str, Any]:
    return {
        "model": server.model,
        "messages": MESSAGES,
        "max_tokens": 300,
        "seed": 5,
        "tools": [WEATHER, CLOCK],
        **fields,
    }


def client_of(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def assert_is_weather(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and arguments.keys() == {"city", "days"}
    assert re.fullmatch("[A-Z][a-z]{2,9}", arguments["city"]) and len(arguments["days"]) == 9


def test_a_call_and_its_result(whole) -> None:
    with client_of(whole) as client:
        named = {"type": "function", "function": {"name": "weather"}}
        answer = client.chat.completions.create(**asked(whole, tool_choice=named)).choices[0]
        assert answer.finish_reason == "stop" and answer.message.tool_calls is not None
        (call,) = answer.message.tool_calls
        assert_is_weather(call)
        assert answer.message.content is None and call.id.startswith("call_")
        history = [
            *MESSAGES,
            answer.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        said = client.chat.completions.create(**asked(whole, messages=history, tool_choice="none", max_tokens=8))
        assert said.choices[0].message.content and not said.choices[0].message.tool_calls
        required = client.chat.completions.create(
            **asked(whole, tool_choice="required", parallel_tool_calls=False, n=2, temperature=1.2)
        )
        for choice in required.choices:
            assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
            assert len(choice.message.tool_calls) == 1 and json.loads(choice.message.tool_calls[0].function.arguments)


def test_a_streamed_call_is_the_whole_one(whole) -> None:
    fields = asked(whole, tool_choice="required", parallel_tool_calls=False)
    with client_of(whole) as client:
        answer = client.chat.completions.create(**fields).choices[0].message
        assert answer.tool_calls is not None
        with client.chat.completions.stream(
            **{**fields, "tools": [{**t, "function": {**t["function"], "strict": True}} for t in fields["tools"]]}
        ) as events:
            deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
            final = events.get_final_completion().choices[0]
        assert len(deltas) > 1 and final.finish_reason == "tool_calls" and final.message.tool_calls is not None
        assert [t.function.arguments for t in final.message.tool_calls] == [
            t.function.arguments for t in answer.tool_calls
        ]


def test_parsed_tools(whole) -> None:
    with client_of(whole) as client:
        answer = client.chat.completions.parse(
            **asked(
                whole, tools=[openai.pydantic_function_tool(Weather)], tool_choice="required", parallel_tool_calls=False
            )
        )
        calls = answer.choices[0].message.tool_calls
        assert calls and isinstance(calls[0].function.parsed_arguments, Weather)


def test_the_model_may_choose(whole) -> None:
    """Free text where it does not call, and a strict tool's grammar where it does."""
    with client_of(whole) as client:
        for tools in ([WEATHER], [CLOCK]):
            answer = client.chat.completions.create(**asked(whole, tools=tools, max_tokens=24)).choices[0]
            assert answer.message.content and answer.finish_reason in ("stop", "length")
        both = client.chat.completions.create(
            **asked(
                whole, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 7}}}
            )
        ).choices[0]
        assert both.message.content == "7" or both.message.tool_calls


def test_reasoning_is_told_apart(whole) -> None:
    """The toy never ends its reasoning: all of it is reasoning."""
    thinking: Any = {"chat_template_kwargs": {"enable_thinking": True}}
    fields = {"model": whole.model, "messages": MESSAGES, "max_tokens": 12, "seed": 1}
    with client_of(whole) as client:
        message = client.chat.completions.create(**fields, extra_body=thinking).choices[0].message
        assert message.content == "" and message.reasoning_content == message.reasoning and message.reasoning  # type: ignore[attr-defined]
        hidden = client.chat.completions.create(**fields, extra_body={**thinking, "include_reasoning": False})
        assert not hasattr(hidden.choices[0].message, "reasoning")
        chunks = list(client.chat.completions.create(**fields, stream=True, extra_body=thinking))
        assert "".join(getattr(x.choices[0].delta, "reasoning", "") for x in chunks) == message.reasoning  # type: ignore[attr-defined]
        with pytest.raises(openai.BadRequestError, match="no token that ends reasoning"):
            client.chat.completions.create(**fields, extra_body={**thinking, "max_thinking_tokens": 3})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, "ignore_eos"),
        ({"tools": [tool("f", True, x={"type": "nonsense"})]}, "tools"),
    ],
)
def test_what_cannot_be_called(whole, fields: dict[str, Any], param: str) -> None:
    with client_of(whole) as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked(whole, **fields))
    assert caught.value.param == param


def test_calls_go_on_when_workers_die(whole) -> None:
    """Streams of calls, disturbed by the death of each kind of worker, are those that nothing disturbed."""
    bodies = [
        asked(whole, tool_choice="required", parallel_tool_calls=False, temperature=1.0) | {"seed": seed}
        for seed in range(6)
    ]

    async def one(client: openai.AsyncOpenAI, body: dict[str, Any], arrived: list[int]) -> str:
        parts: list[str] = []
        async for chunk in await client.chat.completions.create(**body, stream=True):
            arrived[0] += 1
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.function is not None
                parts.append((call.function.name or "") + (call.function.arguments or ""))
        return "".join(parts)

    async def run(faults: list[Fault]) -> list[set[str]]:
        """What each body is answered, again and again until the last fault."""
        arrived, are_over = [0], asyncio.Event()

        async def again(client: openai.AsyncOpenAI, body: dict[str, Any]) -> set[str]:
            said = {await one(client, body, arrived)}
            while not are_over.is_set():
                said.add(await one(client, body, arrived))
            return said

        async with openai.AsyncOpenAI(base_url=f"{whole.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
            tasks = [asyncio.create_task(again(client, body)) for body in bodies]
            for fault in faults:
                begun = arrived[0]
                while arrived[0] < begun + 30:
                    assert not any(task.done() for task in tasks), "one has failed"
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(fault)
            are_over.set()
            return await asyncio.gather(*tasks)

    expected = asyncio.run(run([]))
    faults = [Fault(whole, 0, signal.SIGKILL), Fault(whole, 3, signal.SIGKILL)]
    assert asyncio.run(run(faults)) == expected
    for fault in faults:
        fault.assert_landed()
    assert all(text.startswith(("weather{", "clock{")) for (text,) in expected)
    c.wait_whole(whole)
