"""What a request may contain, and how it is told when it may not."""

import json
from typing import Any

import msgspec
import pytest

from everserve.errors import RequestError
from everserve.gateway.http.errors import explain_bad_json
from everserve.gateway.http.requests import UNSUPPORTED, ChatRequest, CompletionRequest, InputMessage, StreamOptions
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
        ("truncate_prompt_tokens", [-1, 1, 10**6], [-2, 0.5]),
        ("truncation_side", ["left", "right"], ["middle"]),
        ("min_tokens", [0, 5], [-1]),
        ("logprobs", [0, 20], [-1, 21, True]),
        ("priority", [0, -5, 2**31 - 1], [2**31, 0.5, "high"]),
        ("prompt_logprobs", [0, 20], [-1, 21, True]),
        ("bad_words", [[], ["x"] * 256], ["x", [""], ["x"] * 257, ["x" * 257], [1]]),
        ("stop", ["a", ["a"] * 16, []], ["", ["a"] * 17, [""], [1], 5]),
        ("stop_token_ids", [[], [1]], [[-1], "1", [2**40]]),
        ("logit_bias", [{}, {"5": 100, "6": -100}], [{"5": 101}, {"x": 1}, {"-1": 1}, [1]]),
        ("prompt", ["", "x", ["x", "y"], [1, 2], [[1], [2]]], [[], [[]], 5, [-1], {"a": 1}, [None]]),
        ("stream", [True, False], [1, "true"]),
        ("stream_options", [{}, {"include_usage": True}], [{"x": 1}, True]),
        ("user", ["someone"], [5]),
        ("echo", [True], ["yes"]),
        (
            "response_format",
            [{"type": "text"}, {"type": "json_object"}],
            [{"type": "x"}, {"type": "json_schema"}, "text"],
        ),
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
        ("reasoning_effort", ["hard", 1]),
        ("tools", ["f", ["f"], {}]),
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
    "reasoning_effort": ["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    "length_penalty": [1.0, 0],
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
        ({"service_tier": "priority"}, ': leave it out, or send "auto" or "default"'),
        ({"modalities": ["text", "audio"]}, ': leave it out, or send ["text"]'),
        ({"prompt_cache_retention": "24h"}, ': leave it out, or send "in_memory"'),
        ({"audio": {"voice": "x"}}, ""),
    ],
)
def test_a_feature_that_we_lack_is_named(fields: dict[str, Any], hint: str) -> None:
    (name,) = fields
    error = chat_error(**fields)
    assert str(error) == f"'{name}' is not supported by this server{hint}."
    assert error.param == name


def test_functions_are_accepted_if_none_may_be_called() -> None:
    fields = {"messages": _MESSAGES, "functions": [{"name": "f"}]}
    check_combinations(_CHAT.decode(json.dumps({**fields, "function_call": "none"}).encode()))
    for asked in ({}, {"function_call": None}, {"function_call": "auto"}):
        with pytest.raises(RequestError, match='leave it out, or send "function_call": "none" with it') as caught:
            check_combinations(_CHAT.decode(json.dumps({**fields, **asked}).encode()))
        assert caught.value.param == "functions"


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
    structs = (CompletionRequest, ChatRequest, InputMessage, StreamOptions)
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
    assert error.param == "messages[0].content[0].type"


def test_a_text_part_may_have_marks_of_other_servers() -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "5m"}, "id": 7}
    _CHAT.decode(json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode())
    for broken, reason in (({"text": 5}, "Expected `str`, got `int`"), ({}, "Missing required parameter")):
        error = chat_error(messages=[{"role": "user", "content": [{"type": "text", "cache_control": {}, **broken}]}])
        assert reason in str(error) and error.param == "messages[0].content[0].text"


def test_a_message_from_a_response_can_be_sent_back() -> None:
    message = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None}
    others: list[dict[str, Any]] = [
        {"tool_calls": [], "annotations": [], "function_call": None},
        {"content": None, "reasoning_content": "so", "reasoning": "so"},
    ]
    messages = [message, *(message | other for other in others), {"role": "assistant"}]
    _CHAT.decode(json.dumps({"messages": messages}).encode())


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_only_the_assistant_may_say_nothing(role: str) -> None:
    for message, reason in (({}, "Missing required parameter"), ({"content": None}, "got `null`")):
        error = chat_error(messages=[*_MESSAGES, {"role": role, **message}])
        assert reason in str(error) and error.param == "messages[1].content"


def test_tool_calls_of_users_are_named() -> None:
    error = chat_error(messages=[{"role": "user", "content": "x", "tool_calls": [{"id": "1", "type": "function"}]}])
    assert str(error) == "'tool_calls' is not supported by this server: leave it out, or send an empty list."
    assert error.param == "messages[0].tool_calls"


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
