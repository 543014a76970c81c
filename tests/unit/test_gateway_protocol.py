"""What a request may contain, and how it is told when it may not."""

import json
from typing import Any

import msgspec
import pytest

from everserve.errors import RequestError
from everserve.gateway.http.errors import explain_bad_json
from everserve.gateway.http.requests import UNSUPPORTED, ChatMessage, ChatRequest, CompletionRequest, StreamOptions
from everserve.gateway.text.sampling import check_combinations

_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)
_MESSAGES = [{"role": "user", "content": "hi"}]


def explain(decoder: "msgspec.json.Decoder[Any]", raw: bytes) -> RequestError:
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError, RecursionError)) as caught:
        decoder.decode(raw)
    return explain_bad_json(caught.value, UNSUPPORTED)


def completion_error(**fields: Any) -> RequestError:
    return explain(_COMPLETION, json.dumps({"prompt": "x", **fields}).encode())


def chat_error(**fields: Any) -> RequestError:
    return explain(_CHAT, json.dumps({"messages": _MESSAGES, **fields}).encode())


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 0.7, 2], [-0.1, 2.1, "1", True]),
        ("top_p", [0.1, 1], [0, 1.1, -1]),
        ("top_k", [-1, 0, 50], [-2, 1.5]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.5, 2], [0, -1]),
        ("n", [1, 128], [0, 129]),
        ("best_of", [1, 128], [0, 129]),
        ("seed", [0, -1, 2**63 - 1, -(2**63)], [2**63, 10**40, 0.5]),
        ("max_tokens", [0, 10**6], [-1, 1.5]),
        ("min_tokens", [0, 5], [-1]),
        ("logprobs", [0, 20], [-1, 21, True]),
        ("stop", ["a", ["a"] * 16, []], ["", ["a"] * 17, [""], [1], 5]),
        ("stop_token_ids", [[], [1]], [[-1], "1", [2**40]]),
        ("logit_bias", [{}, {"5": 100, "6": -100}], [{"5": 101}, {"x": 1}, {"-1": 1}, [1]]),
        ("prompt", ["", "x", ["x", "y"], [1, 2], [[1], [2]]], [[], [[]], 5, [-1], {"a": 1}, [None]]),
        ("stream", [True, False], [1, "true"]),
        ("stream_options", [{}, {"include_usage": True}], [{"x": 1}, True]),
        ("user", ["someone"], [5]),
        ("echo", [True], ["yes"]),
        ("response_format", [{"type": "text"}], [{"type": "json_object"}, "text"]),
    ],
)
def test_ranges_of_completions(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in [*good, *([None] if field != "prompt" else [])]:
        _COMPLETION.decode(json.dumps({"prompt": "x", field: value}).encode())
    for value in bad:
        error = completion_error(**{field: value})
        assert (error.param or "").startswith(field), (value, error, error.param)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("messages", [[], "hi", [{}], [{"role": "user"}], [{"role": "nobody", "content": "x"}]]),
        ("top_logprobs", [-1, 21]),
        ("max_tokens", [0, -1]),
        ("max_completion_tokens", [0]),
        ("logprobs", [3]),
        ("chat_template_kwargs", [[], "x"]),
    ],
)
def test_ranges_of_chat(field: str, bad: list[Any]) -> None:
    for value in bad:
        assert (chat_error(**{field: value}).param or "").startswith("messages" if field == "messages" else field)


def test_an_unknown_field_is_named_as_openai_does() -> None:
    error = completion_error(temprature=1)
    assert str(error) == "Unrecognized request argument supplied: temprature"
    assert error.param == "temprature"
    assert completion_error(stream_options={"usage": True}).param == "stream_options.usage"


HARMLESS: dict[str, list[Any]] = {
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "functions": [[]],
    "function_call": ["none"],
    "parallel_tool_calls": [True, False],
    "store": [False],
    "metadata": [{}, {"session": "7"}],
    "service_tier": ["auto", "default"],
    "prompt_cache_key": ["team-a"],
    "prompt_cache_retention": ["in_memory"],
    "safety_identifier": ["f00d"],
    "user": ["somebody"],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "verbosity": ["medium"],
    "use_beam_search": [False],
    "bad_words": [[]],
    "priority": [0],
    "stream_options": [{"include_usage": None}, {"include_obfuscation": False}],
}


@pytest.mark.parametrize("field", HARMLESS)
def test_what_changes_nothing_is_accepted(field: str) -> None:
    for value in [*HARMLESS[field], None]:
        request = _CHAT.decode(json.dumps({"messages": _MESSAGES, "stream": True, field: value}).encode())
        check_combinations(request)


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"tools": [{"type": "function"}]}, ": leave it out, or send an empty list"),
        ({"tool_choice": "required"}, ': leave it out, or send "none" or "auto"'),
        ({"tool_choice": {"type": "function"}}, ': leave it out, or send "none" or "auto"'),
        ({"functions": [{"name": "f"}]}, ": leave it out, or send an empty list"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            ': leave it out, or send {"type": "text"}',
        ),
        ({"service_tier": "priority"}, ': leave it out, or send "auto" or "default"'),
        ({"modalities": ["text", "audio"]}, ': leave it out, or send ["text"]'),
        ({"prompt_cache_retention": "24h"}, ': leave it out, or send "in_memory"'),
        ({"priority": 1}, ": leave it out, or send 0"),
        ({"audio": {"voice": "x"}}, ""),
        ({"reasoning_effort": "medium"}, ""),
        ({"reasoning_effort": "none"}, ""),
    ],
)
def test_a_feature_that_we_lack_is_named(fields: dict[str, Any], hint: str) -> None:
    (name,) = fields
    assert str(chat_error(**fields)) == f"'{name}' is not supported by this server{hint}."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ],
)
def test_what_may_only_be_false(fields: dict[str, Any], param: str) -> None:
    request = _CHAT.decode(json.dumps({"messages": _MESSAGES, **fields}).encode())
    with pytest.raises(RequestError, match="not supported by this server: leave it out, or send false") as caught:
        check_combinations(request)
    assert caught.value.param == param


def test_every_field_that_is_named_as_unsupported_exists() -> None:
    structs = (CompletionRequest, ChatRequest, ChatMessage, StreamOptions)
    assert set(UNSUPPORTED) <= {name for struct in structs for name in struct.__struct_fields__}


@pytest.mark.parametrize(
    "metadata", [{"k": 1}, {"k" * 65: "v"}, {"k": "v" * 513}, {str(i): "v" for i in range(17)}, ["k"]]
)
def test_metadata_has_the_limits_of_openai(metadata: Any) -> None:
    assert (chat_error(metadata=metadata).param or "").startswith("metadata")


def test_suffix_is_not_supported() -> None:
    assert str(completion_error(suffix="x")).startswith("'suffix' is not supported by this server")
    _COMPLETION.decode(b'{"prompt": "x", "suffix": ""}')


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"image_url": {"url": "x"}, "type": "image_url"}]
)
def test_only_text_parts(part: dict[str, Any]) -> None:
    error = chat_error(messages=[{"role": "user", "content": [part]}])
    assert str(error) == "Only text is supported as message content."


def test_a_message_from_a_response_can_be_sent_back() -> None:
    message = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None}
    _CHAT.decode(json.dumps({"messages": [message, message | {"tool_calls": [], "annotations": []}]}).encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"prompt": "x"} trailing',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00 x"}',
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "y": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "stop": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"prompt": "x", "' + b"y" * 100_000 + b'": 1}',
    ],
)
def test_nonsense_is_explained_briefly(raw: bytes) -> None:
    error = explain(_COMPLETION, raw)
    assert 10 < len(str(error)) < 500


def test_deep_nesting_where_anything_is_allowed() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    body = b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":' + deep + b"}}"
    assert "nested" in str(explain(_CHAT, body))
