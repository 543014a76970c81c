"""POST /v1/responses, field by field, and the chat request that it means."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from everserve.errors import RequestError
from everserve.gateway.api.converted import chat_request
from everserve.gateway.http.errors import not_supported
from everserve.gateway.http.requests import (
    INT64_MAX,
    MAX_BAD_WORDS,
    MAX_STOPS,
    BadWord,
    CacheSalt,
    ChatRequest,
    LogitBias,
    MetadataKey,
    MetadataValue,
    NumLogprobs,
    NumTokens,
    OnlyFalse,
    Penalty,
    Priority,
    ReasoningEffort,
    StopString,
    TokenId,
)
from everserve.tables.requests import MAX_STOP_IDS

# What chats call these fields, and what they are called here.
NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
    "verbosity": "text.verbosity",
}
LOGPROBS = "message.output_text.logprobs"


class ResponseReasoning(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """No summary of what a model thinks is written: what it thinks is in the answer."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseText(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_obfuscation: OnlyFalse | None = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses"""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None

    max_output_tokens: NumTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: NumLogprobs | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None  # of tools that a server runs itself

    # For the books of a server that keeps any
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    truncation: Literal["disabled"] | None = None

    # vLLM's further options
    seed: Annotated[int, Meta(ge=-(2**63), le=INT64_MAX)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: LogitBias | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    skip_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    context_management: None = None
    conversation: None = None
    moderation: None = None
    prompt: None = None
    prompt_cache_options: None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


UNSUPPORTED = {
    field.name: "" for field in msgspec.structs.fields(ResponsesRequest) if field.type is type(None)
} | {
    "include": f'["{LOGPROBS}"]',
    "truncation": '"disabled"',
    "service_tier": '"auto" or "default"',
    "prompt_cache_retention": '"in_memory"',
    "verbosity": '"medium"',
    "summary": '"auto"',
    "generate_summary": '"auto"',
}  # fmt: skip

# These mean the same in a chat.
_SAME = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "seed", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("bad_words", "priority", "cache_salt", "skip_special_tokens", "chat_template_kwargs", "user", "metadata"),
)


def as_chat(request: ResponsesRequest, messages: Iterable[dict[str, Any]]) -> ChatRequest:
    """The chat that has these messages, after the instructions."""
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise not_supported("include_obfuscation", "false", "stream_options.include_obfuscation")
    if request.background and not request.is_stored:
        raise RequestError("A response in the background has to be stored: leave 'store' out.", "store")
    if request.top_logprobs and not request.wants_logprobs:
        raise RequestError(f"'top_logprobs' can only be given together with '{LOGPROBS}' in 'include'.", "top_logprobs")
    leading = [{"role": "system", "content": request.instructions}] if request.instructions is not None else []
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    fields |= {
        "messages": [*leading, *messages],
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": True if request.wants_logprobs else None,
        "top_logprobs": request.top_logprobs if request.wants_logprobs else None,
        "tools": [_tool(tool, f"tools[{n}]") for n, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _tool_choice(request.tool_choice) if request.tools else None,
        "response_format": _format(request.text.format if request.text is not None else None),
        "reasoning_effort": request.reasoning.effort if request.reasoning is not None else None,
    }
    return chat_request(fields, NAMES)


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(f"'{path}': only tools of type 'function' are supported by this server.", f"{path}.type")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
