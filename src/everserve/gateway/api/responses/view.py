"""A response as clients see it, and the events by which it comes."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from everserve.gateway.api.responses.items import Output, OutputText, ReasoningText
from everserve.gateway.api.responses.request import ResponsesRequest
from everserve.gateway.http.responses import Degraded, TokenLogprob

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseIncomplete(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(msgspec.Struct, kw_only=True):
    code: Literal["server_error"] = "server_error"
    message: str


class ResponseInputDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseOutputDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int
    masked_tokens: int | UnsetType = UNSET


class ResponseView(msgspec.Struct, kw_only=True):
    """The whole response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool = False
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: ResponseIncomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[Output] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] = {}
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    degraded: Degraded | UnsetType = UNSET  # as in chats


def new_view(id: str, created: int, model: str, request: ResponsesRequest, status: Status) -> ResponseView:
    """A response that has no output yet."""
    text, reasoning = request.text, request.reasoning
    return ResponseView(
        id=id,
        created_at=created,
        status=status,
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning={"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        store=request.is_stored,
        temperature=request.temperature,
        text={"format": (text.format if text is not None else None) or {"type": "text"}},
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=request.top_p,
        user=request.user,
    )


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event. Which fields it has follows from its type, as in OpenAI's API."""

    type: str
    sequence_number: int
    response: ResponseView | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Output | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    degraded: Degraded | UnsetType = UNSET


class DeletedView(msgspec.Struct, kw_only=True):
    id: str
    object: str
    deleted: bool = True


class ItemsView(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
