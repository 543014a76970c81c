"""Fields of requests that are answered with vectors, or with what follows from them. Names are OpenAI's and vLLM's."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from everserve.errors import RequestError
from everserve.gateway.http.requests import (
    INT64_MAX,
    CacheSalt,
    ChatMessages,
    ChatRequest,
    CompletionRequest,
    Priority,
    PromptList,
)

MAX_TEXTS = 8192
# What the client calls fields that have another name in completions
INPUT_NAMES = {"prompt": "input"}
Text = Annotated[str, Meta(min_length=1)]
Texts = Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_TEXTS)]


class PoolingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What all of them accept."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None

    request_id: None = None
    softmax: None = None
    activation: None = None
    mm_processor_kwargs: None = None


class EmbeddingsRequest(PoolingRequest, kw_only=True):
    """POST /v1/embeddings: of texts, token ids, or of one chat."""

    input: str | PromptList | None = None
    messages: ChatMessages | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None  # vLLM's newer name for it
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = None

    @property
    def has_length_1(self) -> bool:
        """Whether vectors are to be normalized."""
        return (self.use_activation if self.normalize is None else self.normalize) is not False


class ScoreRequest(PoolingRequest, kw_only=True):
    """POST /v1/score: one text beside each of several, or as many beside as many."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None  # vLLM's further names for the same
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def pairs(self) -> tuple[list[str], list[str]]:
        """The texts on both sides. The first has one, or as many as the second."""
        first = _side(self, ("text_1", "queries", "data_1"))
        second = _side(self, ("text_2", "documents", "items", "data_2"))
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"'text_1' has {len(first)} texts and 'text_2' {len(second)}: give one for 'text_1', or as many.",
                "text_1",
            )
        return first, second


class RerankRequest(PoolingRequest, kw_only=True):
    """POST /v1/rerank: documents, those nearest to the query first."""

    query: Text
    documents: Annotated[list[Text], Meta(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None  # 0: all of them
    return_documents: bool | None = None


def as_chat(request: EmbeddingsRequest) -> ChatRequest:
    """The chat whose prompt is meant."""
    assert request.messages is not None
    return ChatRequest(
        messages=request.messages,
        add_generation_prompt=bool(request.add_generation_prompt),
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        add_special_tokens=request.add_special_tokens,
    )


def as_completion(request: PoolingRequest, prompt: str | list[Any]) -> CompletionRequest:
    """The completion of no tokens whose prompts are meant."""
    return CompletionRequest(
        prompt=prompt,
        max_tokens=0,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        add_special_tokens=request.add_special_tokens,
    )


def _side(request: ScoreRequest, names: tuple[str, ...]) -> list[str]:
    given = {name: texts for name in names if (texts := getattr(request, name)) is not None}
    if len(given) != 1:
        problem = "Missing required parameter" if not given else "Give only one of the parameters"
        raise RequestError(f"{problem}: {', '.join(map(repr, given or names[:1]))}.", names[0])
    (texts,) = given.values()
    return [texts] if isinstance(texts, str) else list(texts)


UNSUPPORTED = {
    field.name: ""
    for kind in (EmbeddingsRequest, ScoreRequest, RerankRequest)
    for field in msgspec.structs.fields(kind)
    if field.type is type(None)
} | {"encoding_format": '"float" or "base64"', "embed_dtype": '"float32"', "endianness": '"little"'}
