"""A message as clients see it, and the events by which it comes."""

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from everserve.gateway.http.responses import Degraded

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextContent(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingContent(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseContent(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


Block: TypeAlias = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(msgspec.Struct, kw_only=True):
    """`input_tokens` are those that were not in a cache."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int
    masked_tokens: int | UnsetType = UNSET  # of the output, sampled while experts were masked


class MessageView(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    degraded: Degraded | UnsetType = UNSET  # as in chats


class MessageDelta(msgspec.Struct, kw_only=True):
    """More of a block, or how the message ended."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(msgspec.Struct, kw_only=True):
    """One event. Which fields it has follows from its type, as in Anthropic's API."""

    type: str
    message: MessageView | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    degraded: Degraded | UnsetType = UNSET


class CountView(msgspec.Struct, kw_only=True):
    input_tokens: int
