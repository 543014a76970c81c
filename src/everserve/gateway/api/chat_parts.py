"""The parts of an answer (text/reading) as chats have them: in deltas of a stream, or in one message."""

from collections.abc import Iterable

from everserve.gateway.http.responses import (
    AssistantMessage,
    Delta,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from everserve.gateway.text.reading.answers import AnswerReader
from everserve.gateway.text.reading.parts import Argued, Called, Part, Said, Thought


def as_delta(reader: AnswerReader, parts: list[Part]) -> Delta:
    """What is new, in one delta. It has a content if there is nothing else."""
    delta = Delta()
    if thoughts := _joined(parts, Thought):
        delta.reasoning_content = delta.reasoning = thoughts
    if said := _joined(parts, Said):
        delta.content = said
    calls: list[ToolCallDelta] = []
    number = reader.num_calls - sum(isinstance(part, Called) for part in parts)
    for part in parts:
        if isinstance(part, Called):
            function = FunctionDelta(name=part.name)
            calls.append(ToolCallDelta(index=number, id=reader.call_id(number), type="function", function=function))
            number += 1
        elif isinstance(part, Argued):
            if not calls or calls[-1].index != number - 1:
                calls.append(ToolCallDelta(index=number - 1, function=FunctionDelta()))
            calls[-1].function.arguments += part.text
    if calls:
        delta.tool_calls = calls
    elif not thoughts and not said:
        delta.content = ""
    return delta


def as_message(reader: AnswerReader, parts: list[Part]) -> AssistantMessage:
    """All of it."""
    message = AssistantMessage(content=_joined(parts, Said))
    if thoughts := _joined(parts, Thought):
        message.reasoning_content = message.reasoning = thoughts
    calls: list[ToolCall] = []
    for part in parts:
        if isinstance(part, Called):
            calls.append(ToolCall(id=reader.call_id(len(calls)), function=FunctionCall(name=part.name, arguments="")))
        elif isinstance(part, Argued):
            calls[-1].function.arguments += part.text
    if calls:
        message.tool_calls = calls
        message.content = message.content or None
    return message


def _joined(parts: Iterable[Part], kind: type[Thought] | type[Said]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))
