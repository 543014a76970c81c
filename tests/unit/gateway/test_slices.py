"""Requests and answers that are a lot of work: bounded, and done in slices between which the event loop goes on."""

import asyncio
import gc
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from everserve.gateway.api import completions, generation
from everserve.gateway.http import errors
from everserve.gateway.http.slices import Slices
from everserve.gateway.text import logprobs, sampling
from everserve.gateway.text.tokenizer import ModelTokenizer
from everserve.tables.outputs import TokenLogprobs
from everserve.tables.requests import RequestSpec
from tests.support.gateway_toy import Response, ToyServer, byte_level_tokenizer, toy_server

TOKENS = byte_level_tokenizer().encode("one two three", add_special_tokens=False).ids
PROMPT = "the end and the end"
LARGE = {"prompt": [PROMPT] * 4, "n": 2, "max_tokens": len(TOKENS), "echo": True, "logprobs": 20}


def script(spec: RequestSpec) -> list[int]:
    return TOKENS


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


class Turns:
    """Counts texts of tokens that are looked up between two turns of the event loop: the work of writing logprobs."""

    def __init__(self) -> None:
        self.largest = 0
        self._num = 0

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.largest, self._num = max(self.largest, self._num), 0

    def count(self, tokenizer: ModelTokenizer) -> None:
        plain = tokenizer.token_text

        def counted(token: int) -> str:
            self._num += 1
            return plain(token)

        tokenizer.token_text = counted  # type: ignore[method-assign]


def choices_of(answer: Response, is_stream: bool) -> dict[int, dict[str, Any]]:
    """The first that was said of each choice, and what is said of it as a whole."""
    bodies = [event for event in answer.events if event != "[DONE]"] if is_stream else [answer.json]
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for body in bodies for choice in body["choices"]):
        found.setdefault(choice["index"], choice)
    return found


async def ask(server: ToyServer, body: dict[str, Any], **headers: str) -> tuple[Response, Turns]:
    turns = Turns()
    turns.count(server.gateway.tokenizer)
    watching = asyncio.ensure_future(turns.watch())
    answer = await server.request("POST", "/v1/completions", body, headers)
    watching.cancel()
    return answer, turns


@pytest.mark.parametrize("is_stream", [False, True])
def test_large_answers_are_written_in_slices(is_stream: bool) -> None:
    """And are the same as those that are written at once."""

    async def test() -> None:
        body = {**LARGE, "stream": is_stream, "max_tokens": 1 if is_stream else len(TOKENS)}
        async with toy_server(script) as server:
            with patch.object(generation, "_LARGE", 1 << 40), patch.object(completions, "_LARGE_SCORES", 1 << 40):
                at_once, _ = await ask(server, body)
        async with toy_server(script) as server:
            with (
                patch.object(generation, "_LARGE", 10),
                patch.object(completions, "_LARGE_SCORES", 10),
                patch.object(logprobs, "_SCORES_PER_SLICE", 42),
            ):
                sliced, turns = await ask(server, body)
                assert server.gateway.slices.num_done > 4 * len(PROMPT.encode()) / 2
        assert 20 < turns.largest <= 2 * (1 + 21), "two tokens, with 20 alternatives each"
        ours, expected = (choices_of(answer, is_stream) for answer in (sliced, at_once))
        assert ours == expected and sorted(ours) == list(range(8))
        for choice in ours.values():
            assert choice["text"].startswith(PROMPT)
            columns = choice["logprobs"]
            assert len({len(column) for column in columns.values()}) == 1
            assert columns["text_offset"] == sorted(columns["text_offset"]) and columns["top_logprobs"][0] is None
        if not is_stream:
            assert sliced.headers["content-length"] == str(len(sliced.body))

    run(test)


def test_a_client_can_come_back_for_a_large_event() -> None:
    async def test() -> None:
        body = {**LARGE, "prompt": PROMPT, "n": 1, "stream": True}
        async with toy_server(script) as server:
            with patch.object(completions, "_LARGE_SCORES", 10):
                answer = await server.request("POST", "/v1/completions", body, {"X-Request-Id": "mine"})
                again = await server.request(
                    "POST", "/v1/completions", body, {"X-Request-Id": "mine", "Last-Event-ID": "0"}
                )
            assert answer.event_ids == list(range(len(TOKENS) + 1)) and again.event_ids == answer.event_ids[1:]
            assert answer.events[1:] == again.events
            assert len(answer.events[0]["choices"][0]["logprobs"]["tokens"]) > 10
            assert server.gateway.keeper.num_bytes >= len(answer.body)

    run(test)


def test_large_chat_answers() -> None:
    async def test() -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 3, "n": 2}
        body |= {"max_tokens": len(TOKENS), "return_token_ids": True}
        async with toy_server(script) as server:
            plain = await server.post("/v1/chat/completions", body)
            with patch.object(generation, "_LARGE", 1), patch.object(logprobs, "_SCORES_PER_SLICE", 8):
                sliced = await server.post("/v1/chat/completions", body)
            assert sliced.json["choices"] == plain.json["choices"] and sliced.json["usage"] == plain.json["usage"]
            assert [len(choice["logprobs"]["content"]) for choice in sliced.json["choices"]] == [len(TOKENS)] * 2
            assert server.gateway.slices.num_done > len(TOKENS) / 2

    run(test)


def test_one_slice_per_turn_whoever_it_is_for() -> None:
    async def test() -> None:
        slices, done, most = Slices(), [0], 0

        def work(name: int) -> Any:
            for _ in range(5):
                done[0] += 1
                yield name

        async def watch() -> None:
            nonlocal most
            while True:
                await asyncio.sleep(0)
                most, done[0] = max(most, done[0]), 0

        watching = asyncio.ensure_future(watch())
        results = await asyncio.gather(*(slices.run(work(name)) for name in range(4)))
        watching.cancel()
        assert results == [[name] * 5 for name in range(4)] and most == 1
        assert await slices.call(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await slices.call(lambda: 1 // 0)
        assert await slices.run([]) == []

    run(test)


def test_the_garbage_collector_does_not_look_at_scores() -> None:
    """There may be hundreds of thousands of them, and no turn of the event loop may take as long as going through."""
    scores = TokenLogprobs(logprob=-1.0, rank=2, top_ids=(5, 6), top_logprobs=(-0.5, -1.0))
    encoded = msgspec.msgpack.encode([scores] * 3)
    received = msgspec.msgpack.decode(encoded, type=list[TokenLogprobs])
    gc.collect()
    for entry in received:
        assert entry == scores and not any(map(gc.is_tracked, (entry, entry.top_ids, entry.top_logprobs)))


def test_very_long_texts_delay_only_each_other() -> None:
    async def test() -> None:
        async with toy_server(script) as server:
            tokenizer, may_end = server.gateway.tokenizer, threading.Event()
            very_long = [asyncio.ensure_future(tokenizer.run(may_end.wait, 1 << 20)) for _ in range(3)]
            assert await tokenizer.run(lambda: "done", 1 << 14) == "done"
            assert not any(task.done() for task in very_long)
            may_end.set()
            assert await asyncio.gather(*very_long) == [True] * 3

    run(test)


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def keys(num: int) -> str:
    return ",".join(f'"k{i}":1' for i in range(num))


MANY_KEYS = f'{{"messages": [], "chat_template_kwargs": {{{keys(1 << 17)}}}}}'


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat/completions", MANY_KEYS, "too many values"),
        ("chat/completions", json.dumps({**CHAT, "chat_template_kwargs": {"x": [1] * 1100}}), "1024 values"),
        ("chat/completions", json.dumps({**CHAT, "chat_template_kwargs": {"x": "y" * 70_000}}), "65536 characters"),
        ("chat/completions", json.dumps({**CHAT, "chat_template_kwargs": {"x": {"y": ["z" * 70_000]}}}), "65536 ch"),
        ("chat/completions", json.dumps({"messages": [{"role": "user", "content": ""}] * 500_000}), "too many values"),
        ("chat/completions", json.dumps({"messages": [{"role": "user", "content": ""}] * 100}), "100 messages"),
        ("completions", json.dumps({"prompt": [1] * 100_000}), "100000 input tokens"),
        ("completions", json.dumps({"prompt": [[1], [2] * 100_000]}), "100000 input tokens"),
        ("completions", '{"prompt": "a", "%s": 1}' % ("`" * (1 << 20)), "Unrecognized request argument"),
        ("completions", '{"prompt": {"%s": 1}}' % ("` - at `$.x`" * (1 << 16)), "prompt"),
    ],
)
def test_what_would_take_long_is_refused(path: str, body: str, message: str) -> None:
    async def test() -> None:
        async with toy_server(script) as server:
            answer = await server.request("POST", f"/v1/{path}", body.encode())
            assert answer.status == 400 and message in answer.error["message"]
            assert len(answer.body) < 2000

    run(test)


def test_words_for_an_error_do_not_depend_on_how_long_a_name_is() -> None:
    """Matching takes time that grows with the square of the length, so that a megabyte must not get there."""

    class Pattern:
        def __init__(self, pattern: Any) -> None:
            self._pattern = pattern

        def match(self, text: str) -> Any:
            assert len(text) < 1000
            return self._pattern.match(text)

    async def test() -> None:
        async with toy_server(script) as server:
            with patch.object(errors, "_UNKNOWN_FIELD", Pattern(errors._UNKNOWN_FIELD)):
                for name in ("x", "`" * (1 << 20)):
                    answer = await server.request("POST", "/v1/completions", b'{"prompt":"a","%b":1}' % name.encode())
                    assert answer.error["param"].startswith(name[:100]) and len(answer.error["param"]) <= 201

    run(test)


def test_commas_and_brackets_in_a_text_are_no_values() -> None:
    async def test() -> None:
        async with toy_server(script) as server:
            answer = await server.post("/v1/completions", {"prompt": '[{",\\' * (1 << 18)})
            assert "maximum context length" in answer.error["message"]

    run(test)


def test_how_much_of_a_prompt_an_answer_repeats() -> None:
    async def test() -> None:
        async with toy_server(script) as server:
            with patch.object(sampling, "MAX_PROMPT_SCORES", 100):
                answer = await server.post("/v1/completions", {"prompt": [5] * 10, "echo": True, "logprobs": 10})
                assert answer.error["param"] == "logprobs" and "110 log probabilities" in answer.error["message"]
            with patch.object(sampling, "MAX_REPEATED_BYTES", 100):
                answer = await server.post(
                    "/v1/completions", {"prompt": "a" * 30, "echo": True, "n": 4, "max_tokens": 2}
                )
                assert answer.error["param"] == "n"
                for fields in ({"echo": True}, {"n": 4}):
                    body = {"prompt": "a" * 30, "max_tokens": 2, **fields}
                    assert (await server.post("/v1/completions", body)).status == 200

    run(test)
