"""Response bodies. Fields that are UNSET do not appear at all."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from everserve.gateway.http.slices import batches

FinishReason = Literal["stop", "length"]  # of a choice
ChatFinishReason = Literal["stop", "length", "tool_calls"]  # as a chat says it
_ITEMS_PER_PIECE = 1 << 13
TEXT = "\ue000"  # stands for a text that is still to come
encode = msgspec.json.Encoder().encode


def encode_around(body: msgspec.Struct, empty: bytes) -> tuple[bytes, bytes]:
    """The JSON of a body before and after the first field that is so empty (b'"choices":[]'), for what is written there
    in pieces. A text in front of it cannot contain that: its quotes are escaped."""
    return split_around(encode(body), empty)


def split_around(encoded: bytes, empty: bytes) -> tuple[bytes, bytes]:
    """The same of JSON."""
    before, found, after = encoded.partition(empty)
    assert found, "the field is there, and empty"
    name, _, _ = empty.partition(b":")
    return before + name + b":", after


def around(body: msgspec.Struct, field: bytes) -> tuple[bytes, bytes]:
    """A server-sent event before and after this field's text, which is TEXT."""
    before, found, after = (b"data: " + encode(body) + b"\n\n").partition(field + encode(TEXT))
    assert found
    return before + field + b'"', b'"' + after


def encode_list(items: Iterable[Any], num_per_piece: int = _ITEMS_PER_PIECE) -> Iterator[bytes]:
    """The JSON of a list, in pieces: of numbers or short texts by default."""
    start = b"["
    for batch in batches(items, num_per_piece):
        yield start + encode(batch)[1:-1]
        start = b","
    yield b"[]" if start == b"[" else b"]"


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    masked_tokens: int | UnsetType = UNSET  # of the completion, sampled while experts were masked


class Degraded(msgspec.Struct, kw_only=True):
    """In every choice, or part of one, that was computed while experts were masked: it is not what the whole model
    gives."""

    masked_ranges: list[tuple[int, int]]  # of its tokens, counted from 0: first, end


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Four lists of equal length; the first entry of an echoed prompt has no logprob."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, kw_only=True):
    """One token's entry in `prompt_logprobs`."""

    logprob: float
    rank: int
    decoded_token: str


# By token id: of the prompt's own token first, and of the likeliest. Nothing comes before the first token.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended the text, if it was one
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    degraded: Degraded | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The whole answer, or one event of a stream (which has `usage` only if asked for)."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(msgspec.Struct, kw_only=True):
    """A message of the assistant, without content if it only calls tools. `reasoning`: the newer name of
    `reasoning_content`.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    degraded: Degraded | UnsetType = UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The beginning of a call, with its id and name, or more of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    degraded: Degraded | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "everserve"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    prompt: str


class Version(msgspec.Struct, kw_only=True):
    version: str


class ServerLoad(msgspec.Struct, kw_only=True):
    server_load: int


class WorkerView(msgspec.Struct, kw_only=True):
    """One worker in `/cluster`."""

    rank: int
    incarnation: int
    pid: int
    roles: list[str]
    state: str
    requests: int  # streams that the gateway has given it
    running: int
    waiting: int
    kv_cache_usage: float
    host: int  # that it is on
    device: int  # workers on one device are lost together
    slots: int  # places for experts, per layer, shadows included
    shadow_slots: int
    slow: bool  # demoted: asked last, and without new streams
    slowness: float | None  # how many times as long as its peers it takes, lately; null if that is not known
    note: str  # what an operator should know


class ProcessView(msgspec.Struct, kw_only=True):
    name: str
    pid: int
    host: int = 0


class SparesView(msgspec.Struct, kw_only=True):
    """Processes that wait to become workers."""

    ready: int
    wanted: int


class ConditionsView(msgspec.Struct, kw_only=True):
    """What violates each of the three conditions of validity (tables/validity.py)."""

    peers: list[str]
    coverage: list[str]
    epochs: list[str]  # attention workers that do not use the published routes yet: normal for the length of a step


class DeviceView(msgspec.Struct, kw_only=True):
    """A failure domain: `gone` until an operator returns it, else `serving` or, without a ready worker, `down`."""

    device: int
    host: int
    state: str
    level: int  # of health: 0 is fine, 6 the worst (docs/operations.md)
    reason: str  # for the level
    note: str  # why what the level asks for is not done yet
    workers: list[int]  # ranks


class HostView(msgspec.Struct, kw_only=True):
    """A machine: `awaited` until it has joined, `serving`, `lost` until it joins again, `gone` until it is returned."""

    host: int
    name: str
    address: str  # that it has joined from; empty: the first host
    state: str
    devices: list[int]
    workers: list[int]  # ranks


class MoveView(msgspec.Struct, kw_only=True):
    """An expert that is being loaded into a slot."""

    rank: int
    layer: int  # among the layers with experts
    slot: int
    expert: int
    source: str | None = None  # "mapped": it is served where a worker left it; otherwise known when it is there


class SurvivalView(msgspec.Struct, kw_only=True):
    """What streams would wait for after the worst failure of a kind, and what would become of their KV, in words."""

    failure: str
    weights: str
    kv: str


class BalanceView(msgspec.Struct, kw_only=True):
    """The work of the busiest device over the mean of all that should serve, in all layers together, of the kind of
    shards where that is most; null without expert workers. `kinds`: of each. The load of experts is what was measured,
    if there was enough; else all count the same."""

    max_over_mean: float | None
    kinds: dict[str, float]


class ClusterView(msgspec.Struct, kw_only=True):
    """`/cluster`: processes and workers; no violations = valid."""

    epoch: int
    violations: list[str]
    degraded: list[str]
    conditions: ConditionsView
    experts_without_place: int  # over all layers
    processes: list[ProcessView]
    spares: SparesView
    workers: list[WorkerView]
    devices: list[DeviceView]
    hosts: list[HostView]
    moves: list[MoveView]  # in progress
    survives: list[SurvivalView]
    balance: BalanceView
    recent: list[str]  # what happened lately, in words, newest first


class ExpertPlaceView(msgspec.Struct, kw_only=True):
    """A slot that holds an expert, of a worker that serves. Rows are dealt among active places."""

    rank: int
    slot: int
    active: bool


class ExpertView(msgspec.Struct, kw_only=True):
    """One expert of one layer."""

    expert: int
    load: float  # rows per second, lately
    places: list[ExpertPlaceView]  # active ones first
    moving: bool  # it is being loaded into another slot
    masked: bool  # streams go on without it


class LayerView(msgspec.Struct, kw_only=True):
    """The experts of one layer. `kind`: what they are: expert, slice (of a dense FFN) or head."""

    layer: int
    kind: str
    experts: list[ExpertView]


class ImbalanceView(msgspec.Struct, kw_only=True):
    """Rows of the busiest expert worker of each layer over the mean of all, over all layers; null without load."""

    max_over_mean: float | None
    worst_layer: int | None


class ExpertsView(msgspec.Struct, kw_only=True):
    """`/cluster/experts`: load and places of every expert."""

    layers: list[LayerView]
    imbalance: ImbalanceView


class ExpertsMapView(msgspec.Struct, kw_only=True):
    """`/cluster/experts?form=map`: the same as tables [index of the layer][expert]."""

    layers: list[int]  # their numbers
    kinds: list[str]  # what the experts of each are: expert, slice or head
    load: list[list[float]]
    places: list[list[int]]  # how many
    active: list[list[int]]  # how many of them are active
    moving: list[tuple[int, int]]  # index of the layer, expert
    masked: list[tuple[int, int]]  # likewise
    imbalance: ImbalanceView
