"""Response bodies. Fields that are UNSET do not appear at all."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from everserve.gateway.http.slices import batches

FinishReason = Literal["stop", "length"]
_ITEMS_PER_PIECE = 1 << 13
encode = msgspec.json.Encoder().encode


def encode_around(body: msgspec.Struct, empty: bytes) -> tuple[bytes, bytes]:
    """The JSON of a body before and after the first field that is so empty (b'"choices":[]'), for what is written there
    in pieces. A text in front of it cannot contain that: its quotes are escaped."""
    before, found, after = encode(body).partition(empty)
    assert found, "the field is there, and empty"
    name, _, _ = empty.partition(b":")
    return before + name + b":", after


def encode_list(items: Iterable[Any]) -> Iterator[bytes]:
    """The JSON of a list of numbers or short texts, in pieces."""
    start = b"["
    for batch in batches(items, _ITEMS_PER_PIECE):
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


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
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


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
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


class Delta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
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
    device: int  # workers on one device are lost together
    slots: int  # places for experts, per layer, shadows included
    shadow_slots: int
    slow: bool  # demoted: asked last, and without new streams
    slowness: float | None  # how many times as long as its peers it takes, lately; null if that is not known
    note: str  # what an operator should know


class ProcessView(msgspec.Struct, kw_only=True):
    name: str
    pid: int


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
    state: str
    level: int  # of health: 0 is fine, 6 the worst (docs/operations.md)
    reason: str  # for the level
    note: str  # why what the level asks for is not done yet
    workers: list[int]  # ranks


class HealthView(msgspec.Struct, kw_only=True):
    """The level that a device has now, why, and what follows from it."""

    device: int
    level: int
    reason: str
    done: str


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
    moves: list[MoveView]  # in progress
    survives: list[SurvivalView]
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


class FaultView(msgspec.Struct, kw_only=True):
    """`POST /cluster/fault`: the process that got the signal, a worker or not."""

    rank: int | UnsetType = UNSET
    incarnation: int | UnsetType = UNSET
    process: str | UnsetType = UNSET
    pid: int
    signal: str


class DeviceChangeView(msgspec.Struct, kw_only=True):
    """`POST /cluster/fault` with a device, `POST /cluster/return`: the device and the ranks on it."""

    device: int
    ranks: list[int]


class DrainView(msgspec.Struct, kw_only=True):
    """`POST /cluster/drain`: the worker that was asked to leave."""

    rank: int
    incarnation: int


class SwitchView(msgspec.Struct, kw_only=True):
    """`POST /cluster/switch`: the worker that changes its role."""

    rank: int
    role: str


class ScaleView(msgspec.Struct, kw_only=True):
    """`POST /cluster/scale`: the workers that there will be, and the ranks that come and go."""

    attention: int
    expert: int
    devices: int
    added: list[int]
    retired: list[int]
