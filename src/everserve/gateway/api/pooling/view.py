"""Answers of vectors and scores, in vLLM's shapes."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from everserve.gateway.http.responses import Degraded, Usage


class EmbeddingView(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # float32 numbers, or their bytes in base64
    degraded: Degraded | UnsetType = UNSET


class EmbeddingsView(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingView]
    usage: Usage


class ScoreView(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float
    degraded: Degraded | UnsetType = UNSET


class ScoresView(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreView]
    usage: Usage


class DocumentView(msgspec.Struct, kw_only=True):
    text: str


class RankedView(msgspec.Struct, kw_only=True):
    index: int  # in the request
    document: DocumentView | UnsetType = UNSET
    relevance_score: float
    degraded: Degraded | UnsetType = UNSET


class RerankView(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: Usage
    results: list[RankedView]
