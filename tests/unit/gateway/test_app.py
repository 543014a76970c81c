"""The gateway as a client sees it, with a scripted worker at the other end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from everserve.errors import OverloadedError
from everserve.gateway.http.bodies import MAX_BODY_WEIGHT
from everserve.gateway.http.exchange import MAX_BODY_BYTES
from everserve.tables.outputs import Output, TokenLogprobs
from everserve.tables.requests import RequestSpec
from everserve.wire.events import ProcessStarted
from tests.support.gateway_toy import EOS, byte_level_tokenizer, toy_server, until

TOKENIZER = byte_level_tokenizer()
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def says(text: str) -> Callable[[RequestSpec], list[int]]:
    return lambda spec: ids(text)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


def test_a_whole_completion() -> None:
    async def test() -> None:
        async with toy_server(says(f"the end{EOS}")) as server:
            answer = await server.post("/v1/completions", {"prompt": "say", "max_tokens": 20, "return_token_ids": True})
            assert answer.status == 200
            (choice,) = answer.json["choices"]
            assert choice["text"] == "the end"
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
            assert choice["prompt_token_ids"] == ids("say") and choice["token_ids"] == ids(f"the end{EOS}")
            assert answer.json["usage"] == {
                "prompt_tokens": 3,
                "completion_tokens": len(choice["token_ids"]),
                "total_tokens": 3 + len(choice["token_ids"]),
                "prompt_tokens_details": {"cached_tokens": 2},
            }
            assert server.gateway.num_requests == 0

    run(test)


def test_a_stream_has_one_event_per_token() -> None:
    async def test() -> None:
        async with toy_server(says("the € and")) as server:
            tokens = ids("the € and")
            body = {"prompt": "say", "max_tokens": len(tokens), "stream": True, "return_token_ids": True}
            answer = await server.post("/v1/completions", body)
            assert answer.headers["content-type"].startswith("text/event-stream")
            *events, done = answer.events
            assert done == "[DONE]"
            assert [event["choices"][0]["token_ids"] for event in events] == [[token] for token in tokens]
            assert "".join(event["choices"][0]["text"] for event in events) == "the € and"
            assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(tokens) - 1)
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert "usage" not in events[0]

    run(test)


def test_usage_in_every_stream() -> None:
    async def test() -> None:
        async with toy_server(says("abc"), enable_force_include_usage=True) as server:
            for path, body in (("/v1/completions", {"prompt": "say"}), ("/v1/chat/completions", CHAT)):
                for options in (None, {"include_usage": False}):
                    asked = {**body, "max_tokens": 3, "stream": True, "stream_options": options}
                    *_, last, _ = (await server.post(path, asked)).events
                    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
                assert (await server.post(path, {**body, "max_tokens": 3})).json["usage"]["completion_tokens"] == 3

    run(test)


@pytest.mark.parametrize("continuous", [False, True])
def test_usage_in_a_stream(continuous: bool) -> None:
    async def test() -> None:
        async with toy_server(says("abc")) as server:
            options = {"include_usage": True, "continuous_usage_stats": continuous}
            for path, body in (("/v1/completions", {"prompt": "say"}), ("/v1/chat/completions", CHAT)):
                answer = await server.post(path, {**body, "max_tokens": 3, "stream": True, "stream_options": options})
                *tokens, last, _ = answer.events
                assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
                assert all((event["usage"] is not None) is continuous for event in tokens)
                if continuous:
                    assert tokens[-1]["usage"]["completion_tokens"] == 3

    run(test)


def test_a_chat() -> None:
    async def test() -> None:
        async with toy_server(says("hello")) as server:
            answer = await server.post("/v1/chat/completions", {**CHAT, "max_completion_tokens": 5})
            (choice,) = answer.json["choices"]
            assert choice["message"] == {"role": "assistant", "content": "hello"}
            assert list(server.worker.specs[0].prompt) == ids("<user>hi<assistant>")
            answer = await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 5, "stream": True})
            first, *rest, done = answer.events
            assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(event["choices"][0]["delta"]["content"] for event in rest) == "hello"
            assert done == "[DONE]"

    run(test)


def test_chat_templates_get_what_was_sent() -> None:
    async def test() -> None:
        async with toy_server(says("x")) as server:

            async def prompt(**fields: Any) -> str:
                answer = await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1, **fields})
                assert answer.status == 200, answer.body
                return TOKENIZER.decode(server.worker.specs[-1].prompt)

            parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            assert await prompt(messages=[{"role": "user", "content": parts}]) == "<user>a\nb<assistant>"
            assert await prompt(add_generation_prompt=False) == "<user>hi"
            assert await prompt(chat_template_kwargs={"extra": "!"}) == "<user>hi<assistant>!"
            continued = [*CHAT["messages"], {"role": "assistant", "content": "Sure, "}]
            text = await prompt(messages=continued, add_generation_prompt=False, continue_final_message=True)
            assert text.endswith("Sure, ")
            for bad in (
                {"continue_final_message": True},
                {"chat_template_kwargs": {"tokenize": True}},
                {"chat_template_kwargs": {"messages": []}},
                {"messages": [*CHAT["messages"], {"role": "system", "content": "late"}]},
            ):
                answer = await server.post("/v1/chat/completions", {**CHAT, **bad})
                assert answer.status == 400, bad
                assert answer.error["type"] == "invalid_request_error"

    run(test)


SHOWS_ALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content is none }} {{ m.content }}{{ m.reasoning }}{% endfor %}"
    "{{ tools }} {{ reasoning_effort }} {{ enable_thinking }}"
)


def test_what_agents_send_reaches_the_template() -> None:
    async def test() -> None:
        async with toy_server(says("x"), chat_template=SHOWS_ALL) as server:

            async def prompt(**fields: Any) -> str:
                answer = await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1, **fields})
                assert answer.status == 200, answer.body
                return TOKENIZER.decode(server.worker.specs[-1].prompt)

            assert await prompt() == "<user>False hiNone  "
            tools = [{"type": "function", "function": {"name": "f"}}]
            assert await prompt(tools=tools, tool_choice="none") == await prompt(), (
                "a model cannot call what it does not see"
            )
            assert await prompt(reasoning_effort="low") == "<user>False hiNone low True"
            assert await prompt(reasoning_effort="none") == "<user>False hiNone none False"
            own = {"enable_thinking": 7, "reasoning_effort": "high"}
            assert await prompt(reasoning_effort="none", chat_template_kwargs=own) == "<user>False hiNone none 7"
            cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
            messages = [
                {"role": "user", "content": [cached]},
                {"role": "assistant", "content": None, "reasoning": "so"},
            ]
            assert await prompt(messages=messages) == "<user>False a<assistant>False soNone  "

    run(test)


def test_prompts_are_cut() -> None:
    async def test() -> None:
        async with toy_server(says("x" * 9)) as server:  # of 64 tokens

            async def send(path: str, **fields: Any) -> list[str]:
                server.worker.specs.clear()
                answer = await server.post(path, {"max_tokens": 1, **fields})
                assert answer.status == 200, answer.body
                return [TOKENIZER.decode(spec.prompt) for spec in server.worker.specs]

            for prompt in ("abcdef", ids("abcdef"), ["abcdef", "gh"], [ids("abcdef"), ids("gh")]):
                short = ["gh"] if len(prompt) == 2 else []
                assert await send("/v1/completions", prompt=prompt, truncate_prompt_tokens=3) == ["def", *short]
                right: Any = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
                assert await send("/v1/completions", prompt=prompt, **right) == ["abc", *short]
            long = "y" * 2000 + "z" * 60
            for num_written in (1, 9):
                fields: Any = {"max_tokens": num_written, "truncate_prompt_tokens": -1}
                (text,) = await send("/v1/completions", prompt=long, **fields)
                assert text == long[-64 + num_written :]
            (text,) = await send(
                "/v1/chat/completions", messages=[{"role": "user", "content": long}], truncate_prompt_tokens=20
            )
            assert text == "z" * 10 + "<assistant>"
            body = {"prompt": long, "max_tokens": 1, "echo": True, "truncate_prompt_tokens": 2}
            answer = await server.post("/v1/completions", body)
            assert answer.json["choices"][0]["text"] == "zzx" and answer.json["usage"]["prompt_tokens"] == 2
            for bad in (0, 65):
                answer = await server.post("/v1/completions", {**body, "truncate_prompt_tokens": bad})
                assert answer.status == 400 and answer.error["param"] == "truncate_prompt_tokens"
            answer = await server.post("/v1/completions", {**body, "prompt": "y" * (1 << 21)})
            assert answer.status == 400 and "at most 1048576 at a time" in answer.error["message"]

    run(test)


def test_without_a_chat_template() -> None:
    async def test() -> None:
        async with toy_server(says("x"), chat_template=None) as server:
            answer = await server.post("/v1/chat/completions", CHAT)
            assert answer.status == 400 and "chat template" in answer.error["message"]

    run(test)


def test_several_prompts_and_choices() -> None:
    async def test() -> None:
        async with toy_server(lambda spec: ids(chr(ord("a") + spec.params.seed % 26) * 3)) as server:
            body = {"prompt": ["one", "two"], "n": 2, "seed": 0, "max_tokens": 3}
            answer = await server.post("/v1/completions", body)
            assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]
            texts = [choice["text"] for choice in answer.json["choices"]]
            assert texts[0] == texts[2] == "aaa" and texts[1] == texts[3]
            assert answer.json["usage"]["prompt_tokens"] == 6
            assert answer.json["usage"]["completion_tokens"] == 12
            assert [list(spec.prompt) for spec in server.worker.specs] == [ids("one")] * 2 + [ids("two")] * 2

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens(stream: bool) -> None:
    async def test() -> None:
        async with toy_server(lambda spec: ids("and then the end, my friend")) as server:
            for include, expected in ((False, "and then "), (True, "and then the end")):
                body = {"prompt": "x", "max_tokens": 40, "stop": ["zzz", "the end"], "stream": stream}
                answer = await server.post("/v1/completions", {**body, "include_stop_str_in_output": include})
                choices = [e["choices"][0] for e in answer.events[:-1]] if stream else answer.json["choices"]
                assert "".join(choice["text"] for choice in choices) == expected
                assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "the end")
                await until(lambda: len(server.worker.cancelled) == len(server.worker.specs))
            assert server.gateway.fleet.num_streams == 0

    run(test)


def test_text_offsets_count_the_characters_that_the_client_gets() -> None:
    """Half characters and hidden tokens have no text of their own."""

    async def test() -> None:
        tokens = [*ids("é€"), TOKENIZER.token_to_id(EOS), *ids("a")]
        async with toy_server(lambda spec: tokens) as server:
            body = {"prompt": "ü", "max_tokens": len(tokens), "logprobs": 0, "echo": True, "ignore_eos": True}
            (whole,) = (await server.post("/v1/completions", body)).json["choices"]
            assert whole["text"] == "üé€a"
            assert whole["logprobs"]["text_offset"] == [0, 0, 1, 1, 2, 2, 2, 3, 3]
            events = (await server.post("/v1/completions", {**body, "stream": True})).events[:-1]
            streamed = [offset for event in events for offset in event["choices"][0]["logprobs"]["text_offset"]]
            assert streamed == whole["logprobs"]["text_offset"]
            prompt = [TOKENIZER.token_to_id(EOS), *ids("ü")]
            (whole,) = (await server.post("/v1/completions", {**body, "prompt": prompt})).json["choices"]
            assert whole["text"] == "üé€a"
            assert whole["logprobs"]["text_offset"] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]

    run(test)


def test_stop_tokens() -> None:
    async def test() -> None:
        async with toy_server(says("the end")) as server:
            stop = TOKENIZER.token_to_id("n")
            for include, text in ((False, "the e"), (True, "the en")):
                body = {"prompt": "x", "stop_token_ids": [stop], "include_stop_str_in_output": include}
                (choice,) = (await server.post("/v1/completions", body)).json["choices"]
                assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", stop)

    run(test)


def test_logprobs_of_a_completion() -> None:
    async def test() -> None:
        async with toy_server(says("the end")) as server:
            body = {"prompt": "and", "max_tokens": 2, "logprobs": 2, "echo": True}
            (whole,) = (await server.post("/v1/completions", body)).json["choices"]
            assert whole["text"] == "andthe "
            assert whole["logprobs"]["tokens"] == ["and", "the", " "]
            assert whole["logprobs"]["text_offset"] == [0, 3, 6]
            assert whole["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
            assert whole["logprobs"]["top_logprobs"][0] is None
            assert whole["logprobs"]["top_logprobs"][1]["the"] == -0.5
            events = (await server.post("/v1/completions", {**body, "stream": True})).events[:-1]
            parts = [event["choices"][0]["logprobs"] for event in events]
            for name, values in whole["logprobs"].items():
                assert [value for part in parts for value in part[name]] == values
            assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]

    run(test)


def test_only_the_prompt() -> None:
    async def test() -> None:
        async with toy_server(says("x")) as server:
            for logprobs in (None, 1):
                body = {"prompt": [ids("the and")], "max_tokens": 0, "echo": True, "logprobs": logprobs}
                (choice,) = (await server.post("/v1/completions", body)).json["choices"]
                assert (choice["text"], choice["finish_reason"]) == ("the and", "length")
                assert (choice["logprobs"] is None) is (logprobs is None)

    run(test)


@pytest.mark.parametrize("num", [1, 200])
def test_prompt_logprobs(num: int) -> None:
    """vLLM's form, in both endpoints; what is echoed beside it has as many alternatives as it asks for."""

    async def test() -> None:
        async with toy_server(says("the end"), is_ready=False) as server:
            server.worker.say_ready(max_model_len=4096, num_blocks=2000)
            await until(lambda: server.gateway.fleet.limits is not None)
            tokens = ids("and the" * num)
            body = {"prompt": [tokens, ids("a")], "max_tokens": 1, "prompt_logprobs": 2}
            first, second = (await server.post("/v1/completions", body)).json["choices"]
            assert second["prompt_logprobs"] == [None] and second["logprobs"] is None
            assert first["prompt_logprobs"][0] is None and len(first["prompt_logprobs"]) == len(tokens)
            name = TOKENIZER.decode([40])
            for token, entry in zip(tokens[1:], first["prompt_logprobs"][1:], strict=True):
                own = {"logprob": -0.5, "rank": 1, "decoded_token": TOKENIZER.decode([token])}
                assert entry == {str(token): own, "40": {"logprob": -1.5, "rank": 2, "decoded_token": name}}
                assert next(iter(entry)) == str(token)
            both = {**body, "prompt": [tokens], "echo": True, "logprobs": 1}
            (choice,) = (await server.post("/v1/completions", both)).json["choices"]
            assert choice["prompt_logprobs"] == first["prompt_logprobs"]
            assert choice["logprobs"]["top_logprobs"][1] == {TOKENIZER.decode([tokens[1]]): -0.5}
            chat = (await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1, "prompt_logprobs": 0})).json
            assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) > 1
            assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])
            plain = (await server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})).json
            assert "prompt_logprobs" not in plain["choices"][0]

    run(test)


def test_the_best_of_many() -> None:
    """Those with the highest mean log probability, best first; all that were made are counted."""

    async def test() -> None:
        async with toy_server(None) as server:
            body = {"prompt": ["a", "b"], "n": 2, "best_of": 3, "max_tokens": 2, "seed": 5}
            task = asyncio.create_task(server.post("/v1/completions", body))
            await until(lambda: len(server.worker.specs) == 6)
            specs = sorted(server.worker.specs, key=lambda spec: int(spec.id.partition(".")[0].rpartition("-")[2]))
            assert len({spec.params.seed for spec in specs}) == 3
            for spec, values in zip(specs, [(-3, -1), (-1, -1), (-5, 0), (-1, -1), (-9,), (-1, -1)], strict=True):
                for index, value in enumerate(values):
                    finish = "length" if index + 1 == len(values) else None
                    scores = TokenLogprobs(logprob=float(value), rank=1, top_ids=(), top_logprobs=())
                    token = ids("xyz"[specs.index(spec) % 3])[0]
                    server.worker.send(
                        Output(id=spec.id, index=index, token=token, finish_reason=finish, logprobs=scores)
                    )
            answer = (await task).json
            assert [choice["text"] for choice in answer["choices"]] == ["yy", "xx", "xx", "zz"]
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            assert all(choice["logprobs"] is None for choice in answer["choices"])
            assert answer["usage"]["completion_tokens"] == 11

    run(test)


def test_priorities_and_salts() -> None:
    async def test() -> None:
        async with toy_server(says("x")) as server:
            for fields in ({}, {"priority": -3, "cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}):
                for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
                    assert (await server.post(path, {**body, "max_tokens": 1, **fields})).status == 200
            responses = {"input": "a", "max_output_tokens": 1, "store": False, "priority": 4, "cache_salt": "a"}
            assert (await server.post("/v1/responses", responses)).status == 200
            specs = server.worker.specs
            assert [spec.flow.priority for spec in specs] == [0, 0, -3, -3, 0, 0, 0, 0, 4]
            salts = [spec.cache_salt for spec in specs]
            assert salts[:2] == [b"", b""] and len({*salts[2:6], salts[8]}) == 1 and len(set(salts)) == 3

    run(test)


def test_bad_words_as_tokens() -> None:
    """At the beginning of a text, and behind a space."""

    async def test() -> None:
        async with toy_server(says("x")) as server:
            words = ["the", " and", "in", "zq"]
            await server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "bad_words": words})
            await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1, "bad_words": ["the"]})
            completion, chat = (spec.params.bad_words for spec in server.worker.specs)
            expected = [ids(space + word) for word in ("the", "and", "in", "zq") for space in ("", " ")]
            assert completion == tuple(map(tuple, expected)) and chat == completion[:2]
            refused = await server.post("/v1/completions", {"prompt": "a", "bad_words": [" "]})
            assert refused.status == 400 and refused.json["error"]["param"] == "bad_words"

    run(test)


def test_logprobs_of_a_chat() -> None:
    async def test() -> None:
        async with toy_server(lambda spec: TOKENIZER.encode("€").ids) as server:
            body = {**CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
            (choice,) = (await server.post("/v1/chat/completions", body)).json["choices"]
            assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[0xE2], [0x82], [0xAC]]
            assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])
            events = (await server.post("/v1/chat/completions", {**body, "stream": True})).events[1:-1]
            streamed = [entry for event in events for entry in event["choices"][0]["logprobs"]["content"]]
            assert streamed == choice["logprobs"]["content"]
            assert "".join(event["choices"][0]["delta"]["content"] for event in events) == "€"

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_streams(stream: bool) -> None:
    async def test() -> None:
        async with toy_server() as server:
            body = {"prompt": ["a", "b"], "max_tokens": 9, "stream": stream}
            task, _, gone = server.begin("POST", "/v1/completions", body)
            await until(lambda: len(server.worker.specs) == 2)
            server.worker.send(*(Output(id=spec.id, index=0, token=50) for spec in server.worker.specs))
            assert server.gateway.num_requests == 1
            gone.set()
            await asyncio.wait_for(task, 5)
            await until(lambda: len(server.worker.cancelled) == 2)
            assert server.gateway.num_requests == 0
            assert server.gateway.fleet.num_streams == 0
            assert 'finished_reason="abort",model_name="toy"} 2.0' in server.metrics_text()

    run(test)


def test_a_client_that_does_not_read_is_given_up() -> None:
    async def test() -> None:
        async with toy_server() as server:
            body = {"prompt": "a", "stream": True}
            task, _, _ = server.begin("POST", "/v1/completions", body, reads=False)
            await until(lambda: len(server.worker.specs) == 1)
            id = server.worker.specs[0].id
            for start in range(0, 100_000, 1000):
                server.worker.send(*(Output(id=id, index=start + i, token=50) for i in range(1000)))
                await until(lambda: server.worker.channel.channel.wants_write is False)
            await until(task.done)
            await until(lambda: server.worker.cancelled == [id])
            assert server.gateway.num_requests == 0

    run(test)


def test_clients_of_a_worker_that_dies_get_their_whole_answers() -> None:
    async def test() -> None:
        async with toy_server() as server:
            body = {"prompt": "a", "max_tokens": 4, "return_token_ids": True}
            whole, whole_answer, _ = server.begin("POST", "/v1/completions", body)
            stream, stream_answer, _ = server.begin("POST", "/v1/completions", {**body, "stream": True})
            await until(lambda: len(server.worker.specs) == 2)
            server.worker.send(*(Output(id=spec.id, index=0, token=ids("x")[0]) for spec in server.worker.specs))
            await until(lambda: bool(stream_answer.body))
            server.worker.die()
            await until(lambda: not server.gateway.fleet.ready_links())
            assert (await server.request("GET", "/health")).status == 503
            late, late_answer, _ = server.begin("POST", "/v1/completions", body)  # accepted, and waits
            await until(lambda: server.gateway.fleet.num_waiting == 3)
            server.script = says("xyz!")
            await server.add_worker(0, 2)
            await asyncio.wait_for(asyncio.gather(whole, stream, late), 5)
            assert (await server.request("GET", "/health")).status == 200
            for answer in (whole_answer, late_answer):
                assert answer.status == 200 and answer.json["choices"][0]["text"] == "xyz!"
                assert answer.json["choices"][0]["token_ids"] == ids("xyz!")
                assert answer.json["usage"]["completion_tokens"] == 4
            *events, done = stream_answer.events
            assert [event["choices"][0]["text"] for event in events] == ["x", "y", "z", "!"] and done == "[DONE]"
            known = [list(spec.known) for spec in server.workers[1].specs]
            assert known == [ids("x"), ids("x"), []]

    run(test)


def test_stop_strings_across_a_failover() -> None:
    """What the client has decides, not what the new worker has said."""

    async def test() -> None:
        async with toy_server() as server:
            text = ids("and the end")
            body = {"prompt": "a", "max_tokens": 30, "stop": "the", "stream": True}
            task, answer, _ = server.begin("POST", "/v1/completions", body)
            await until(lambda: len(server.worker.specs) == 1)
            id, cut = server.worker.specs[0].id, len(ids("and"))
            server.worker.send(*(Output(id=id, index=i, token=token) for i, token in enumerate(text[:cut])))
            await until(lambda: bool(answer.body))
            server.script = lambda spec: text
            second = await server.add_worker(1)
            server.orchestrator.lose(server.worker)
            await asyncio.wait_for(task, 5)
            choices = [event["choices"][0] for event in answer.events[:-1]]
            assert "".join(choice["text"] for choice in choices) == "and "
            assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "the")
            await until(lambda: second.cancelled == [id])

    run(test)


def test_a_client_that_leaves_while_its_stream_waits() -> None:
    async def test() -> None:
        async with toy_server() as server:
            server.worker.die()
            await until(lambda: not server.gateway.fleet.ready_links())
            task, _, gone = server.begin("POST", "/v1/completions", {"prompt": "a", "n": 2})
            await until(lambda: server.gateway.fleet.num_waiting == 2)
            gone.set()
            await asyncio.wait_for(task, 5)
            assert server.gateway.fleet.num_streams == 0
            second = await server.add_worker(0, 2)
            assert second.specs == []
            assert 'finished_reason="abort",model_name="toy"} 2.0' in server.metrics_text()

    run(test)


def test_shutting_down_ends_streams_that_wait() -> None:
    async def test() -> None:
        async with toy_server() as server:
            server.worker.die()
            await until(lambda: not server.gateway.fleet.ready_links())
            task, answer, _ = server.begin("POST", "/v1/completions", {"prompt": "a", "stream": True})
            await until(lambda: server.gateway.fleet.num_waiting == 1)
            server.gateway.fleet.close(OverloadedError("shut down"))
            await asyncio.wait_for(task, 5)
            assert answer.status == 503 and answer.error["message"] == "shut down"

    run(test)


def test_tokens_of_a_cancelled_request_never_reach_the_next_one_with_its_id() -> None:
    async def test() -> None:
        async with toy_server() as server:
            headers = {"X-Request-Id": "mine"}
            first, _, gone = server.begin("POST", "/v1/completions", {"prompt": "a"}, headers)
            await until(lambda: len(server.worker.specs) == 1)
            gone.set()
            await first
            body = {"prompt": "a", "max_tokens": 1}
            second, answer, _ = server.begin("POST", "/v1/completions", body, headers)
            await until(lambda: len(server.worker.specs) == 2)
            old, new = server.worker.specs
            server.worker.send(Output(id=old.id, index=0, token=ids("x")[0], finish_reason="length"))
            server.worker.send(Output(id=new.id, index=0, token=ids("y")[0], finish_reason="length"))
            await second
            assert answer.json["choices"][0]["text"] == "y" and answer.json["id"] == "cmpl-mine"

    run(test)


@pytest.mark.parametrize(("is_server_fault", "status"), [(False, 400), (True, 500)])
def test_a_stream_that_cannot_begin_has_a_true_status(is_server_fault: bool, status: int) -> None:
    async def test() -> None:
        async with toy_server() as server:
            task, answer, _ = server.begin("POST", "/v1/completions", {"prompt": "a", "stream": True})
            await until(lambda: len(server.worker.specs) == 1)
            server.worker.reject(server.worker.specs[0].id, "no", is_server_fault)
            await task
            assert answer.status == status and answer.error["message"] == "no"

    run(test)


def test_duplicates_and_gaps() -> None:
    async def test() -> None:
        async with toy_server() as server:
            task, answer, _ = server.begin("POST", "/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 4})
            await until(lambda: len(server.worker.specs) == 1)
            id = server.worker.specs[0].id
            server.worker.send(*(Output(id=id, index=index, token=50) for index in (0, 0, 1, 3)))
            await task
            assert len(answer.events) == 3 and "error" in answer.events[-1]
            await until(lambda: server.worker.cancelled == [id])
            assert "everserve_stale_messages_total 1.0" in server.metrics_text()

    run(test)


def test_a_full_queue() -> None:
    async def test() -> None:
        async with toy_server(max_queue=3) as server:
            task, _, gone = server.begin("POST", "/v1/completions", {"prompt": "a", "n": 2})
            await until(lambda: len(server.worker.specs) == 2)
            full = await server.post("/v1/completions", {"prompt": "a", "n": 2})
            assert full.status == 503 and "retry-after" in full.headers
            never = await server.post("/v1/completions", {"prompt": ["a", "b"], "n": 2})
            assert never.status == 400
            gone.set()
            await task

    run(test)


def test_not_ready_yet() -> None:
    async def test() -> None:
        async with toy_server(is_ready=False) as server:
            for path in ("/health", "/readyz", "/ping", "/v1/models"):
                answer = await server.request("GET", path)
                assert answer.status == 503 and "retry-after" in answer.headers
                assert "no worker has started yet" in answer.error["message"]
            assert (await server.post("/v1/completions", {"prompt": "a"})).status == 503
            for path in ("/livez", "/version", "/metrics"):
                assert (await server.request("GET", path)).status == 200

    run(test)


def test_while_shutting_down() -> None:
    async def test() -> None:
        async with toy_server(says("x")) as server:
            server.gateway.is_draining = True
            assert (await server.post("/v1/completions", {"prompt": "a"})).status == 503
            for path, status in (("/health", 503), ("/readyz", 503), ("/livez", 200)):
                assert (await server.request("GET", path)).status == status

    run(test)


def test_api_keys() -> None:
    async def test() -> None:
        async with toy_server(says("x"), api_keys=["first", "second"]) as server:
            for key in ("first", "second"):
                assert (
                    await server.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
                ).status == 200
            for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "first"}, {"Authorization": ""}):
                for method, path in (("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/cluster")):
                    answer = await server.request(method, path, headers=headers)
                    assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
            for path in ("/livez", "/readyz", "/health", "/ping", "/metrics", "/version"):
                assert (await server.request("GET", path)).status == 200

    run(test)


def test_request_ids() -> None:
    async def test() -> None:
        async with toy_server(says("x")) as server:
            answer = await server.request(
                "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, {"X-Request-Id": "my-id"}
            )
            assert answer.headers["x-request-id"] == "my-id" and answer.json["id"] == "cmpl-my-id"
            missing = await server.request("GET", "/nowhere", headers={"X-Request-Id": "my-id"})
            assert missing.status == 404 and missing.headers["x-request-id"] == "my-id"
            for bad in ("", "a b", "é", "x" * 129):
                answer = await server.request("GET", "/version", headers={"X-Request-Id": bad})
                assert answer.status == 400 and answer.headers["x-request-id"]

    run(test)


def test_two_requests_with_one_id_are_two_requests() -> None:
    async def test() -> None:
        async with toy_server() as server:
            headers = {"X-Request-Id": "same"}
            begun = [server.begin("POST", "/v1/completions", {"prompt": "a"}, headers) for _ in range(2)]
            await until(lambda: len(server.worker.specs) == 2)
            assert len({spec.id for spec in server.worker.specs}) == 2
            for _, _, gone in begun:
                gone.set()
            await asyncio.gather(*(task for task, _, _ in begun))

    run(test)


def test_paths_methods_and_bodies() -> None:
    async def test() -> None:
        async with toy_server(says("x")) as server:
            assert (await server.request("GET", "/nowhere")).error["message"] == "Invalid URL (GET /nowhere)."
            wrong = await server.request("GET", "/v1/completions")
            assert wrong.status == 405 and wrong.headers["allow"] == "POST"
            form = await server.request(
                "POST", "/v1/completions", b"prompt=a", {"content-type": "application/x-www-form-urlencoded"}
            )
            assert form.status == 400 and "application/json" in form.error["message"]
            large = await server.request("POST", "/v1/completions", b"{}", {"content-length": str(MAX_BODY_BYTES + 1)})
            assert large.status == 413
            unannounced = await server.request(
                "POST", "/v1/completions", b" " * (MAX_BODY_BYTES + 1), {"content-length": "0"}
            )
            assert unannounced.status == 413
            unknown = await server.post("/v1/completions", {"prompt": "a", "model": "other"})
            assert unknown.status == 404 and unknown.error["code"] == "model_not_found"
            assert (await server.request("GET", "/v1/models/alias")).json["id"] == "alias"
            assert (await server.request("GET", "/v1/models/other")).status == 404

    run(test)


def test_head_is_get_without_a_body() -> None:
    async def test() -> None:
        async with toy_server() as server:
            for path in ("/version", "/health", "/v1/models", "/openapi.json", "/events"):
                assert (await server.request("HEAD", path)).status == 200
            wrong = await server.request("DELETE", "/v1/models")
            assert wrong.status == 405 and wrong.headers["allow"] == "GET, HEAD"

    run(test)


def test_names_with_slashes() -> None:
    async def test() -> None:
        async with toy_server(served_model_names=["org/name"]) as server:
            assert (await server.request("GET", "/v1/models/org/name")).json["id"] == "org/name"

    run(test)


def test_a_bug_costs_one_request(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with toy_server() as server:
            server.app.state.views.metrics.get = lambda: 1 // 0  # type: ignore[method-assign]
            task, answer, _ = server.begin("GET", "/metrics", headers={"X-Request-Id": "mine"})
            with pytest.raises(ZeroDivisionError):  # for uvicorn, which closes the connection
                await task
            assert answer.status == 500 and answer.error["message"] == "Internal server error."
            assert answer.headers["x-request-id"] == "mine"
            assert (await server.request("GET", "/version")).status == 200

    run(test)
    assert "ZeroDivisionError" in caplog.text


def test_bodies_that_would_take_long_to_decode() -> None:
    async def test() -> None:
        async with toy_server() as server:
            body = b'{"prompt": [' + b"1," * MAX_BODY_WEIGHT + b"1,1]}"
            answer = await server.request("POST", "/v1/completions", body)
            assert answer.status == 400 and "too many values" in answer.error["message"]

    run(test)


def test_equal_prompts_give_different_samples_unless_the_client_has_a_seed() -> None:
    async def test() -> None:
        async with toy_server(says("x")) as server:
            body: dict[str, Any] = {"prompt": ["one"] * 3, "n": 2, "max_tokens": 1}
            assert (await server.post("/v1/completions", body)).status == 200
            seeds = [spec.params.seed for spec in server.worker.specs]
            assert len(set(seeds)) == 6
            assert (await server.post("/v1/completions", {**body, "seed": 5})).status == 200
            seeds = [spec.params.seed for spec in server.worker.specs[6:]]
            assert seeds == seeds[:2] * 3 and len(set(seeds)) == 2 and seeds[0] == 5

    run(test)


def test_prompts_that_make_no_sense() -> None:
    async def test() -> None:
        async with toy_server(says("x")) as server:
            for prompt in ("", ["a", ""], ["a", 5], [5, [6]], [264, 265], [[265]], "x" * 64):
                answer = await server.post("/v1/completions", {"prompt": prompt})
                assert answer.status == 400 and answer.error["param"] == "prompt", prompt
            assert server.worker.specs == []

    run(test)


def test_tokenize_and_back() -> None:
    async def test() -> None:
        async with toy_server(says("x")) as server:
            answer = await server.post("/tokenize", {"prompt": "the €", "return_token_strs": True})
            assert answer.json["tokens"] == ids("the €") and answer.json["count"] == len(ids("the €"))
            assert answer.json["max_model_len"] == 64
            assert answer.json["token_strs"][0] == "the"
            back = await server.post("/detokenize", {"tokens": answer.json["tokens"]})
            assert back.json == {"prompt": "the €"}
            chat = await server.post("/tokenize", {**CHAT, "model": "toy"})
            assert chat.json["tokens"] == ids("<user>hi<assistant>") and chat.json["token_strs"] is None
            for bad in ({}, {"prompt": "a", **CHAT}):
                assert (await server.post("/tokenize", bad)).status == 400
            assert (await server.post("/detokenize", {"tokens": [265]})).status == 400
            info = (await server.request("GET", "/tokenizer_info")).json
            assert info["tokenizer_class"] and "<{{ m.role }}>" in info["chat_template"]

    run(test)


def test_long_texts_are_tokenized_in_a_thread() -> None:
    """The event loop goes on meanwhile; the answer is the same."""

    async def test() -> None:
        async with toy_server(says("x")) as server:
            text = "the and " * 2000
            assert (await server.post("/tokenize", {"prompt": text})).json["tokens"] == ids(text)
            too_long = await server.post("/v1/completions", {"prompt": text})
            assert too_long.status == 400 and str(len(text)) in too_long.error["message"]
            too_long = await server.post("/tokenize", {"prompt": "the and " * (1 << 18)})
            assert too_long.status == 400 and "at most 1048576" in too_long.error["message"]

    run(test)


def test_events_are_a_ring_and_then_live() -> None:
    async def test() -> None:
        async with toy_server() as server:
            for pid in range(1500):
                server.gateway.feed.publish(ProcessStarted(process="supervisor", child="x", child_pid=pid))
            task, answer, gone = server.begin("GET", "/events")
            await until(lambda: answer.body.count(b"\n\n") == 1000)
            server.gateway.feed.publish(ProcessStarted(process="supervisor", child="x", child_pid=7777))
            await until(lambda: b'"child_pid":7777' in answer.body)
            assert answer.body.startswith(b'event: process_started\ndata: {"event":"process_started"')
            gone.set()
            await asyncio.wait_for(task, 5)
            assert server.gateway.feed.num_readers == 0

    run(test)


def test_a_reader_of_events_that_does_not_read_is_dropped() -> None:
    async def test() -> None:
        async with toy_server() as server:
            feed = server.gateway.feed
            reader = feed.open_reader()
            for _ in range(5000):
                feed.publish(ProcessStarted(process="supervisor", child="x", child_pid=1))
            await reader.wait()
            assert await reader.take() is None
            assert len(reader._waiting) <= 2000
            feed.close_reader(reader)

    run(test)


def test_openapi_describes_every_route() -> None:
    async def test() -> None:
        async with toy_server() as server:
            document = (await server.request("GET", "/openapi.json")).json
            assert document["openapi"].startswith("3.2")
            for path, methods in document["paths"].items():
                for operation in methods.values():
                    assert {"200", "202"} & set(operation["responses"]), path
            body = document["components"]["schemas"]["CompletionRequest"]
            assert body["required"] == ["prompt"] and body["additionalProperties"] is False
            assert {"400", "404", "413", "500", "503"} < set(document["paths"]["/v1/completions"]["post"]["responses"])

    run(test)
