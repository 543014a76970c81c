"""/v1/embeddings, /v1/score, /v1/rerank"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from everserve.errors import RequestError
from everserve.gateway.api.converted import renamed
from everserve.gateway.api.depends import NEEDS_KEY, NEEDS_LIMITS, gateway_of
from everserve.gateway.api.openapi import describe
from everserve.gateway.api.pooling.pool import Pool, PooledResponse
from everserve.gateway.api.pooling.request import (
    INPUT_NAMES,
    UNSUPPORTED,
    EmbeddingsRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    as_chat,
    as_completion,
)
from everserve.gateway.api.pooling.view import (
    DocumentView,
    EmbeddingsView,
    EmbeddingView,
    RankedView,
    RerankView,
    ScoresView,
    ScoreView,
)
from everserve.gateway.http.access import audience
from everserve.gateway.http.exchange import held_by, read_json
from everserve.gateway.http.responses import Degraded, PromptTokensDetails, Usage, encode, encode_around
from everserve.gateway.text import vectors
from everserve.gateway.text.prompts import Prompt, chat_prompt, completion_prompts
from everserve.gateway.text.sampling import hash_salt
from everserve.tables.outputs import Output

router = APIRouter(dependencies=[NEEDS_KEY, NEEDS_LIMITS])
_embeddings_decoder = msgspec.json.Decoder(EmbeddingsRequest)
_score_decoder = msgspec.json.Decoder(ScoreRequest)
_rerank_decoder = msgspec.json.Decoder(RerankRequest)
_NO_USAGE = Usage(
    prompt_tokens=0, completion_tokens=0, total_tokens=0, prompt_tokens_details=PromptTokensDetails(cached_tokens=0)
)


@router.post("/v1/embeddings", openapi_extra=describe(EmbeddingsView, request=EmbeddingsRequest))
async def embed(http_request: Request) -> Response:
    request = await read_json(http_request, _embeddings_decoder, UNSUPPORTED)
    gateway = gateway_of(http_request)
    model = gateway.check_model(request.model)
    if (request.input is None) == (request.messages is None):
        raise RequestError("Give either 'input' or 'messages'.", "input")
    gateway.dimensions.check(request.dimensions)
    if request.messages is not None:
        prompts = [await chat_prompt(as_chat(request), gateway.tokenizer, gateway.limits())]
    else:
        assert request.input is not None
        prompts = await _prompts(http_request, request, request.input, "input")
    state = http_request.state
    view = EmbeddingsView(id=f"embd-{state.request_id}", created=state.created_s, model=model, data=[], usage=_NO_USAGE)

    def pieces(pool: Pool) -> Iterator[bytes]:
        view.usage = pool.usage()
        views = (encode(_embedding(request, index, output)) for index, output in enumerate(pool.outputs()))
        return _around(view, b'"data":[]', views)

    return _respond(http_request, request, view.id, prompts, pieces)


@router.post("/v1/score", openapi_extra=describe(ScoresView, request=ScoreRequest))
@router.post("/score", openapi_extra=describe(ScoresView, request=ScoreRequest))
async def score(http_request: Request) -> Response:
    """How near the vectors of two texts are."""
    request = await read_json(http_request, _score_decoder, UNSUPPORTED)
    model = gateway_of(http_request).check_model(request.model)
    first, second = request.pairs()
    prompts = await _prompts(http_request, request, [*first, *second], "text_1")
    state = http_request.state
    view = ScoresView(id=f"score-{state.request_id}", created=state.created_s, model=model, data=[], usage=_NO_USAGE)

    def pieces(pool: Pool) -> Iterator[bytes]:
        view.usage, outputs = pool.usage(), pool.outputs()
        scores = (
            encode(ScoreView(index=index, score=value, degraded=degraded))
            for index, value, degraded in _scores(outputs[: len(first)], outputs[len(first) :])
        )
        return _around(view, b'"data":[]', scores)

    return _respond(http_request, request, view.id, prompts, pieces)


@router.post("/v1/rerank", openapi_extra=describe(RerankView, request=RerankRequest))
@router.post("/rerank", openapi_extra=describe(RerankView, request=RerankRequest))
@router.post("/v2/rerank", openapi_extra=describe(RerankView, request=RerankRequest))
async def rerank(http_request: Request) -> Response:
    """The documents that are nearest to a query, nearest first."""
    request = await read_json(http_request, _rerank_decoder, UNSUPPORTED)
    model = gateway_of(http_request).check_model(request.model)
    prompts = await _prompts(http_request, request, [request.query, *request.documents], "documents")
    view = RerankView(id=f"rerank-{http_request.state.request_id}", model=model, results=[], usage=_NO_USAGE)
    shows_documents = request.return_documents is not False

    def pieces(pool: Pool) -> Iterator[bytes]:
        view.usage, (query, *documents) = pool.usage(), pool.outputs()
        scored = []
        for each in _scores([query], documents):
            scored.append(each)
            yield b""  # a slice each
        scored.sort(key=lambda each: (-each[1], each[0]))
        for index, value, degraded in scored[: request.top_n or None]:
            text = DocumentView(text=request.documents[index]) if shows_documents else UNSET
            view.results.append(RankedView(index=index, document=text, relevance_score=value, degraded=degraded))
        yield encode(view)

    return _respond(http_request, request, view.id, prompts, pieces)


def _embedding(request: EmbeddingsRequest, index: int, output: Output) -> EmbeddingView:
    vector = _vector(output, request.dimensions)
    if request.has_length_1:
        vector = vectors.normalized(vector)
    shown: list[float] | str = vectors.as_base64(vector) if request.encoding_format == "base64" else vector.tolist()
    return EmbeddingView(index=index, embedding=shown, degraded=_degraded(output))


def _scores(first: Sequence[Output], second: Sequence[Output]) -> Iterator[tuple[int, float, Degraded | UnsetType]]:
    """The index, the score, and whether experts were masked, of each pair."""
    for index, right in enumerate(second):
        left = first[index if len(first) > 1 else 0]
        degraded = _degraded(left) or _degraded(right)
        yield index, vectors.cosine(_vector(left), _vector(right)), degraded


def _vector(output: Output, num_wanted: int | None = None) -> vectors.Vector:
    assert output.pooled is not None, "its params ask for that"
    return vectors.read(output.pooled, num_wanted)


def _degraded(output: Output) -> Degraded | UnsetType:
    return Degraded(masked_ranges=[(0, 1)]) if output.masked is not None else UNSET


async def _prompts(http_request: Request, request: PoolingRequest, texts: str | list[Any], field: str) -> list[Prompt]:
    gateway = gateway_of(http_request)
    names = {**INPUT_NAMES, "prompt": field}
    try:
        completion = as_completion(request, texts)
        return await completion_prompts(completion, gateway.tokenizer, gateway.limits(), gateway.slices)
    except RequestError as error:
        raise renamed(error, names) from error


def _respond(
    http_request: Request,
    request: PoolingRequest,
    id: str,
    prompts: list[Prompt],
    pieces: Callable[[Pool], Iterator[bytes]],
) -> Response:
    gateway, state = gateway_of(http_request), http_request.state
    flow = gateway.flow(state.owner, request.priority or 0)
    may_see = audience(state.owner, state.has_own_id)
    salt, held = hash_salt(request.cache_salt), held_by(http_request)
    return PooledResponse(gateway, Pool(gateway, prompts, id, may_see, flow, salt, held), state.owner, pieces)


def _around(view: msgspec.Struct, empty: bytes, items: Iterator[bytes]) -> Iterator[bytes]:
    """The JSON of a view, with these in its list."""
    start, end = encode_around(view, empty)
    start += b"["
    for item in items:
        yield start + item
        start = b","
    yield b"]" + end
