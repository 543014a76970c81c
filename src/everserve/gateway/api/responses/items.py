"""What a response is given and what it answers: items. Given ones become the messages of a chat."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from everserve.errors import RequestError
from everserve.gateway.http.errors import explain_bad_json
from everserve.gateway.http.responses import TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class Part(msgspec.Struct, kw_only=True):
    """A text in a message, or one that the model refused to write."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None


class GivenMessage(msgspec.Struct, kw_only=True):
    """What other servers add (`phase`) changes nothing."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class GivenCall(msgspec.Struct, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class GivenOutput(msgspec.Struct, kw_only=True):
    """What a function has returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]


class GivenReasoning(msgspec.Struct, kw_only=True):
    type: Literal["reasoning"]
    summary: list[Part] = []
    content: list[Part] | None = None


Given: TypeAlias = GivenMessage | GivenCall | GivenOutput | GivenReasoning
_KINDS: dict[str, type[Given]] = {
    "message": GivenMessage,
    "function_call": GivenCall,
    "function_call_output": GivenOutput,
    "reasoning": GivenReasoning,
}


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status | UnsetType = UNSET
    summary: list[None] = []
    content: list[ReasoningText]


Output: TypeAlias = OutputMessage | OutputCall | OutputReasoning


def as_items(given: str | list[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """What a client has given, as items with ids. Those that are no items of ours are refused."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    items = []
    for n, item in enumerate(given):
        read_item(item, f"input[{n}]")
        made = {"type": "message", **item}
        if not isinstance(made.get("id"), str):
            made["id"] = f"item_{response_id.removeprefix('resp_')}{n:04x}"
        items.append(made)
    return items


def read_item(item: dict[str, Any], path: str) -> Given:
    kind = _KINDS.get(str(item.get("type", "message")))
    if kind is None:
        known = ", ".join(_KINDS)
        raise RequestError(f"'{path}' is of a type that is not supported by this server (only {known}).", path)
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        told = explain_bad_json(error, {})
        where = f"{path}.{told.param}" if told.param else path
        if ".content[" in where and where.endswith(".type"):
            raise RequestError("Only text is supported as message content.", where) from error
        raise RequestError(str(told).replace(f"'{told.param}'", f"'{where}'"), where) from error


def messages_of(items: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same as messages of a chat. What the model thought, said and called one after the other is one message."""
    said: dict[str, Any] | None = None  # of the assistant, as far as it goes
    last = _THOUGHT
    for item in items:
        given = read_item(item, "input")
        place = _place(given)
        if said is not None and (place is None or place < last or place == last != _CALLED):
            yield said
            said = None
        if place is None:
            yield _other_message(given)
            continue
        said = said or {"role": "assistant"}
        last = place
        if isinstance(given, GivenReasoning):
            said["reasoning_content"] = _text(given.content or given.summary)
        elif isinstance(given, GivenCall):
            function = {"name": given.name, "arguments": given.arguments}
            said.setdefault("tool_calls", []).append({"id": given.call_id, "type": "function", "function": function})
        elif isinstance(given, GivenMessage):
            said["content"] = _text(given.content)
    if said is not None:
        yield said


_THOUGHT, _SAID, _CALLED = range(3)  # the order in one message of the assistant


def _place(given: Given) -> int | None:
    """None: it is not the assistant's."""
    if isinstance(given, GivenReasoning):
        return _THOUGHT
    if isinstance(given, GivenCall):
        return _CALLED
    return _SAID if isinstance(given, GivenMessage) and given.role == "assistant" else None


def _other_message(given: Given) -> dict[str, Any]:
    if isinstance(given, GivenOutput):
        return {"role": "tool", "tool_call_id": given.call_id, "content": _text(given.output)}
    assert isinstance(given, GivenMessage)
    return {"role": given.role, "content": _text(given.content)}


def _text(content: str | list[Part]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal or "" for part in content)
