"""POST /v1/messages, field by field, and the chat request that it means."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from everserve.errors import RequestError
from everserve.gateway.api.converted import chat_request
from everserve.gateway.http.requests import MAX_STOPS, ChatRequest, NumTokens, StopString

# What chats call these fields, and what they are called here.
NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "max_completion_tokens": "max_tokens",
}


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Marks that other servers understand (`cache_control`) change nothing here and below."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool | None = None  # the content says what went wrong


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class TurnGiven(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class MessageTool(msgspec.Struct, kw_only=True):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessageToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["disabled"]


class MessageFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageFormat | None = None


class MessageMetadata(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    user_id: str | None = None


class CountRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens"""

    model: str
    messages: Annotated[list[TurnGiven], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages"""

    max_tokens: NumTokens
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    container: None = None
    context_management: None = None
    mcp_servers: None = None


UNSUPPORTED = {
    "container": "",
    "context_management": "",
    "mcp_servers": "",
    "thinking": '{"type": "disabled"}',
    "service_tier": '"auto" or "standard_only"',
}


def as_chat(request: CountRequest) -> ChatRequest:
    """A last message of the assistant is continued."""
    fields: dict[str, Any] = {"model": request.model, "messages": list(messages_of(request))}
    if request.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.tools:
        fields |= {"tools": list(map(_tool, request.tools)), **_tool_choice(request.tool_choice)}
    if request.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": False}
    if (config := request.output_config) is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.schema, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request, MessagesRequest):
        fields |= {
            "max_completion_tokens": request.max_tokens,
            "stream": request.stream,
            "stop": request.stop_sequences or None,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
        }
    return chat_request(fields, NAMES)


def messages_of(request: CountRequest) -> Iterator[dict[str, Any]]:
    """The messages as a chat has them."""
    if request.system is not None:
        yield {"role": "system", "content": _text(request.system)}
    for n, message in enumerate(request.messages):
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _of_assistant(message.content, f"messages[{n}].content")
        else:
            yield from _of_user(message.content, f"messages[{n}].content")


def _of_assistant(blocks: list[Block], path: str) -> dict[str, Any]:
    """What it thought, said and called."""
    made: dict[str, Any] = {"role": "assistant"}
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            made["reasoning_content"] = block.thinking
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
            made.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
        else:
            raise RequestError(f"'{path}': the assistant does not give results of tools.", path)
    if texts or "tool_calls" not in made:
        made["content"] = "".join(texts)
    return made


def _of_user(blocks: list[Block], path: str) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own, in front of what the user says."""
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        elif not isinstance(block, TextBlock):
            raise RequestError(f"'{path}': only the assistant thinks, and uses tools.", path)
    said = [block for block in blocks if isinstance(block, TextBlock)]
    if said or not blocks:
        yield {"role": "user", "content": _text(said)}


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tool(tool: MessageTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: MessageToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError("A 'name' belongs to a choice of type 'tool', and only to that.", "tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    asked: dict[str, Any] = {"tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type)}
    if choice.disable_parallel_tool_use:
        asked["parallel_tool_calls"] = False
    return asked
