"""/v1/responses without processes: scripted workers, a real store."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from everserve.gateway.api.responses.items import messages_of
from everserve.tables.requests import RequestSpec
from tests.support.gateway_toy import EOS, Response, ToyServer, until
from tests.support.keeping import TOKENIZER, ids, keeping, run, says


def echoes(spec: RequestSpec) -> list[int]:
    """The number of tokens of the prompt, so that an answer shows what was asked."""
    return ids(f"{len(spec.prompt)}.{EOS}")


def events_of(answer: Response) -> list[Any]:
    """The JSON of each event, whose name is its type."""
    events = []
    for part in answer.body.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def ended(server: ToyServer, id: str) -> Any:
    """The response, when it runs no more."""
    while True:
        view = (await server.request("GET", f"/v1/responses/{id}")).json
        if view["status"] not in ("queued", "in_progress"):
            return view
        await asyncio.sleep(0.01)


def test_a_whole_response(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says(f"the end{EOS}")) as server:
            answer = await server.post("/v1/responses", {"input": "say", "instructions": "be brief"})
            assert answer.status == 200, answer.body
            view = answer.json
            (item,) = view["output"]
            assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
            assert [part["text"] for part in item["content"]] == ["the end"]
            assert view["status"] == "completed" and view["usage"]["output_tokens"] == len(ids(f"the end{EOS}"))
            assert view["usage"]["input_tokens"] == len(server.worker.specs[0].prompt)
            assert (await server.request("GET", f"/v1/responses/{view['id']}")).json == view
            (given,) = (await server.request("GET", f"/v1/responses/{view['id']}/input_items")).json["data"]
            assert given["content"] == [{"type": "input_text", "text": "say"}]

    run(test)


def test_a_stream_is_the_response_in_pieces(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says("the € and")) as server:
            body = {"input": "say", "stream": True, "max_output_tokens": 4}
            events = events_of(await server.post("/v1/responses", body))
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            types = [event["type"].removeprefix("response.") for event in events]
            assert types[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
            assert types[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
            text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
            last = events[-1]["response"]
            assert last["output"][0]["content"][0]["text"] == events[-4]["text"] == text
            assert last["incomplete_details"] == {"reason": "max_output_tokens"}
            assert (await server.request("GET", f"/v1/responses/{last['id']}")).json == last

    run(test)


def test_a_response_continues_another(tmp_path: Path) -> None:
    async def test() -> None:
        template = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
        async with keeping(tmp_path, echoes, chat_template=template) as server:
            first = (await server.post("/v1/responses", {"input": "one"})).json
            second = (await server.post("/v1/responses", {"input": "two", "previous_response_id": first["id"]})).json
            third = await server.post("/v1/responses", {"input": "three", "previous_response_id": second["id"]})
            assert third.json["previous_response_id"] == second["id"]
            written = TOKENIZER.decode(list(server.worker.specs[2].prompt))
            said = [view["output"][0]["content"][0]["text"] for view in (first, second)]
            assert written == f"<u>one<a>{said[0]}<u>two<a>{said[1]}<u>three"
            missing = await server.post("/v1/responses", {"input": "x", "previous_response_id": "resp_0"})
            assert missing.status == 404 and missing.error["param"] == "previous_response_id"

    run(test)


def test_what_is_not_stored_is_not_there(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says("a")) as server:
            view = (await server.post("/v1/responses", {"input": "x", "store": False, "max_output_tokens": 1})).json
            assert (await server.request("GET", f"/v1/responses/{view['id']}")).status == 404
            kept = (await server.post("/v1/responses", {"input": "x", "max_output_tokens": 1})).json
            deleted = await server.request("DELETE", f"/v1/responses/{kept['id']}")
            assert deleted.json == {"id": kept["id"], "object": "response", "deleted": True}
            assert (await server.request("GET", f"/v1/responses/{kept['id']}")).status == 404

    run(test)


def test_a_response_belongs_to_a_key(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says("a"), api_keys=["k1", "k2"]) as server:
            one, other = {"authorization": "Bearer k1"}, {"authorization": "Bearer k2"}
            view = (await server.post("/v1/responses", {"input": "x", "max_output_tokens": 1}, **one)).json
            path = f"/v1/responses/{view['id']}"
            assert (await server.request("GET", path, headers=one)).status == 200
            for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                assert (await server.request(method, path + rest, headers=other)).status == 404
        async with keeping(tmp_path, says("a"), api_keys=["new", "k1"]) as server:  # another name, the same key
            assert (await server.request("GET", path, headers=one)).status == 200
            assert (await server.request("GET", path, headers={"authorization": "Bearer new"})).status == 404

    run(test)


def test_a_response_in_the_background(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says(f"the end{EOS}")) as server:
            begun = (await server.post("/v1/responses", {"input": "x", "background": True})).json
            assert begun["status"] == "queued" and begun["background"]
            view = await ended(server, begun["id"])
            assert view["status"] == "completed" and view["output"][0]["content"][0]["text"] == "the end"
            assert view["created_at"] == begun["created_at"]
            path = f"/v1/responses/{begun['id']}?stream=true"
            events = events_of(await server.request("GET", path))
            assert events[-1]["response"] == view
            assert events_of(await server.request("GET", path + "&starting_after=3")) == events[4:]
            assert (await server.post(f"/v1/responses/{begun['id']}/cancel", None)).json == view  # too late

    run(test)


def test_a_reader_sees_each_event_once_while_it_runs(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says("abcdef"), is_paced=True) as server:
            body = {"input": "x", "background": True, "stream": True, "max_output_tokens": 6}
            task, first, gone = server.begin("POST", "/v1/responses", body)
            await until(lambda: len(server.worker.specs) == 1)
            for _ in range(3):
                server.worker.advance()
            await until(lambda: b'"delta":"c"' in first.body)
            id = events_of(first)[0]["response"]["id"]
            assert (await server.request("GET", f"/v1/responses/{id}")).json["status"] == "in_progress"
            gone.set()  # the client leaves: the response goes on
            await task
            seen = events_of(first)
            task, rest, _ = server.begin("GET", f"/v1/responses/{id}?stream=true&starting_after={len(seen) - 1}")
            while server.worker.advance():
                pass
            await task
            events = seen + events_of(rest)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[-1]["response"]["output"][0]["content"][0]["text"] == "abcdef"
            assert server.worker.cancelled == []

    run(test)


def test_a_run_is_cancelled(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says("abcdef"), is_paced=True) as server:
            begun = (await server.post("/v1/responses", {"input": "x", "background": True})).json
            await until(lambda: len(server.worker.specs) == 1)
            server.worker.advance()
            view = (await server.post(f"/v1/responses/{begun['id']}/cancel", None)).json
            assert view["status"] == "cancelled"
            await until(lambda: bool(server.worker.cancelled))
            assert (await ended(server, begun["id"]))["status"] == "cancelled"

    run(test)


@pytest.mark.parametrize("is_background", [True, False])
def test_a_response_goes_on_after_the_death_of_its_process(tmp_path: Path, is_background: bool) -> None:
    """As if by SIGKILL: what the process knew is gone, what was committed is there."""
    body = {"input": "x", "background": is_background, "temperature": 1.0, "max_output_tokens": 6}

    async def test() -> None:
        async with keeping(tmp_path, says("abcdef"), is_paced=True) as server:
            task, answer, _ = server.begin("POST", "/v1/responses", {**body, "stream": True})
            await until(lambda: len(server.worker.specs) == 1)
            for _ in range(3):
                server.worker.advance()
            await until(lambda: b'"delta":"c"' in answer.body)
            seen = events_of(answer)
            id, seed = seen[0]["response"]["id"], server.worker.specs[0].params.seed
            server.app.state.jobs.responses.attended.clear()  # nothing is said to the store from here on
            server.app.state.jobs.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with keeping(tmp_path, says("abcdef")) as server:
            view = await ended(server, id)
            assert view["status"] == "incomplete" and view["output"][0]["content"][0]["text"] == "abcdef"
            assert [spec.params.seed for spec in server.worker.specs] == [seed]
            events = events_of(await server.request("GET", f"/v1/responses/{id}?stream=true"))
            assert events[: len(seen)] == seen and events[-1]["response"] == view

    run(test)


def test_a_client_that_leaves_ends_its_response(tmp_path: Path) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says("abcdef"), is_paced=True) as server:
            task, answer, gone = server.begin("POST", "/v1/responses", {"input": "x", "stream": True})
            await until(lambda: len(server.worker.specs) == 1)
            server.worker.advance()
            await until(lambda: b'"delta":"a"' in answer.body)
            gone.set()
            await task
            view = await ended(server, events_of(answer)[0]["response"]["id"])
            assert view["status"] == "cancelled"

    run(test)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"text": {"format": {"type": "odd"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"store": False, "background": True}, "store"),
        ({"model": "other"}, "model"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(tmp_path: Path, change: Any, param: str) -> None:
    async def test() -> None:
        async with keeping(tmp_path, says("a")) as server:
            answer = await server.post("/v1/responses", {"input": "x", **change})
            assert answer.status in (400, 404) and answer.error["param"].startswith(param), answer.body

    run(test)


def test_items_become_the_messages_of_a_chat() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"role": "assistant", "content": "and"},
        {"role": "developer", "content": "d"},
    ]
    function = {"name": "f", "arguments": "{}"}
    assert list(messages_of(items)) == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "tool_calls": [{"id": id, "type": "function", "function": function} for id in ("c1", "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "so"},
        {"role": "assistant", "content": "and"},
        {"role": "developer", "content": "d"},
    ]
