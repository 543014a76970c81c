"""/v1/messages with scripted workers."""

import json
from typing import Any

import msgspec
import pytest

from everserve.gateway.api.messages.request import MessagesRequest, messages_of
from tests.support.gateway_toy import EOS, Response, toy_server, until
from tests.support.keeping import ids, run, says

ASKED: Any = {"model": "toy", "max_tokens": 20, "messages": [{"role": "user", "content": "say"}]}


def events_of(answer: Response) -> list[Any]:
    events = []
    for part in answer.body.decode().split("\n\n")[:-1]:
        *_, name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_whole_message() -> None:
    async def test() -> None:
        async with toy_server(says(f"the end{EOS}")) as server:
            answer = await server.post("/v1/messages", {**ASKED, "system": [{"type": "text", "text": "be brief"}]})
            view = answer.json
            assert view["content"] == [{"type": "text", "text": "the end", "citations": None}]
            assert (view["type"], view["role"], view["stop_reason"]) == ("message", "assistant", "end_turn")
            num_prompt = len(server.worker.specs[0].prompt)
            assert view["usage"]["input_tokens"] + view["usage"]["cache_read_input_tokens"] == num_prompt
            assert view["usage"]["output_tokens"] == len(ids(f"the end{EOS}"))
            assert list(server.worker.specs[0].prompt) == ids("<system>be brief<user>say<assistant>")
            counted = await server.post("/v1/messages/count_tokens", {"model": "toy", "messages": ASKED["messages"]})
            assert counted.json == {"input_tokens": len(ids("<user>say<assistant>"))}

    run(test)


@pytest.mark.parametrize(
    ("text", "change", "reason", "sequence"),
    [
        (f"the end{EOS}", {}, "end_turn", None),
        ("the end", {"max_tokens": 2}, "max_tokens", None),
        ("the end", {"stop_sequences": ["en"]}, "stop_sequence", "en"),
        ("the " * 60, {"max_tokens": 1000}, "model_context_window_exceeded", None),
    ],
)
def test_a_stream_is_the_message_in_pieces(text: str, change: Any, reason: str, sequence: str | None) -> None:
    async def test() -> None:
        async with toy_server(says(text)) as server:
            whole = (await server.post("/v1/messages", {**ASKED, **change})).json
            events = events_of(await server.post("/v1/messages", {**ASKED, **change, "stream": True}))
            first, begin, *deltas, stop, last, end = events
            assert first["message"]["content"] == [] and first["message"]["usage"]["input_tokens"] > 0
            assert (begin["type"], stop["type"]) == ("content_block_start", "content_block_stop")
            assert (last["type"], end["type"]) == ("message_delta", "message_stop")
            assert "".join(event["delta"]["text"] for event in deltas) == whole["content"][0]["text"]
            assert last["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
            assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
            assert last["usage"] == whole["usage"]

    run(test)


def test_a_message_of_the_assistant_is_continued() -> None:
    async def test() -> None:
        async with toy_server(says(f"b{EOS}")) as server:
            messages = [*ASKED["messages"], {"role": "assistant", "content": "a"}]
            assert (await server.post("/v1/messages", {**ASKED, "messages": messages})).json["content"][0][
                "text"
            ] == "b"
            assert list(server.worker.specs[0].prompt) == ids("<user>say<assistant>a")

    run(test)


def test_errors_have_the_form_that_clients_read() -> None:
    async def test() -> None:
        async with toy_server(says("abc"), is_paced=True, api_keys=["k"]) as server:
            key = {"x-api-key": "k"}
            for change, status, kind, headers in (
                ({"max_tokens": 0}, 400, "invalid_request_error", key),
                ({"thinking": {"type": "enabled", "budget_tokens": 5}}, 400, "invalid_request_error", key),
                ({"model": "other"}, 404, "not_found_error", key),
                ({}, 401, "authentication_error", {}),
            ):
                answer = await server.post("/v1/messages", {**ASKED, **change}, **headers)
                assert answer.status == status and answer.json["type"] == "error", answer.body
                assert answer.json["error"]["type"] == kind and answer.json["error"]["message"]
            task, answer, _ = server.begin("POST", "/v1/messages", {**ASKED, "stream": True}, key)
            await until(lambda: len(server.worker.specs) == 1)
            server.worker.advance()
            await until(lambda: b"text_delta" in answer.body)
            server.worker.reject(server.worker.specs[0].id, "broken", is_server_fault=True)
            await task
            assert events_of(answer)[-1] == {"type": "error", "error": {"type": "api_error", "message": "broken"}}

    run(test)


def test_tools_and_thinking_become_messages_of_a_chat() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    body = {
        **ASKED,
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, use]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]},
                    {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
    }
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert list(messages_of(msgspec.convert(body, MessagesRequest))) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "1"},
        {"role": "user", "content": "so?"},
    ]
