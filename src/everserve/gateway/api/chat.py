"""/v1/chat/completions"""

import time
from collections.abc import Iterator

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from everserve.gateway.api.answers import respond, resume
from everserve.gateway.api.depends import NEEDS_KEY, NEEDS_LIMITS, gateway_of
from everserve.gateway.api.openapi import describe
from everserve.gateway.http import sse
from everserve.gateway.http.exchange import read_json
from everserve.gateway.http.requests import ChatRequest
from everserve.gateway.http.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatResponse,
    Degraded,
    Delta,
    Usage,
    encode,
    encode_around,
)
from everserve.gateway.streams.choices import Choice
from everserve.gateway.text.logprobs import chat_logprobs, encode_chat_logprobs
from everserve.gateway.text.prompts import chat_prompt
from everserve.gateway.text.sampling import check_combinations
from everserve.gateway.text.tokenizer import ModelTokenizer
from everserve.tables.outputs import Output

router = APIRouter(dependencies=[NEEDS_KEY, NEEDS_LIMITS])
_decoder = msgspec.json.Decoder(ChatRequest)
_LARGE_IDS = 1 << 13  # they are written by the task that sends them


@router.post("/v1/chat/completions", openapi_extra=describe(ChatResponse, request=ChatRequest, stream=ChatChunk))
async def chat(http_request: Request) -> Response:
    if (rest := resume(http_request)) is not None:
        return rest
    gateway = gateway_of(http_request)
    request = await read_json(http_request, _decoder)
    model = gateway.check_model(request.model)
    check_combinations(request)
    gateway.check_room(request.n or 1)
    prompt = await chat_prompt(request, gateway.tokenizer, gateway.limits())
    id = f"chatcmpl-{http_request.state.request_id}"
    renderer = ChatRenderer(id, model, request, gateway.tokenizer)
    return respond(http_request, request, renderer, id, [prompt])


class ChatRenderer:
    """Writes answers as messages of the assistant."""

    def __init__(self, id: str, model: str, request: ChatRequest, tokenizer: ModelTokenizer) -> None:
        self._id = id
        self._model = model
        self._created = int(time.time())
        self._wants_logprobs = bool(request.logprobs)
        self._wants_ids = bool(request.return_token_ids)
        self._wants_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._tokenizer = tokenizer

    def events(self, choice: Choice, text: str, output: Output, usage: Usage | None) -> tuple[sse.Event, ...]:
        rendered = ChatChunkChoice(
            index=choice.index,
            delta=Delta(content=text),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if output.masked is not None:
            rendered.degraded = Degraded(masked_ranges=[(output.index, output.index + 1)])
        if self._wants_logprobs and output.token is not None:
            rendered.logprobs = chat_logprobs([(output.token, output.logprobs)], self._tokenizer)
        if self._wants_ids and output.token is not None:
            rendered.token_ids = [output.token]
        event = sse.event(self._chunk([rendered], usage))
        return (self._role_event(choice, usage), event) if output.index == 0 else (event,)

    def last_event(self, usage: Usage) -> bytes:
        return sse.event(self._chunk([], usage))

    def whole(self, choices: list[Choice], usage: Usage) -> Iterator[bytes]:
        response = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[],
            usage=usage,
            prompt_token_ids=choices[0].prompt.ids if self._wants_ids else UNSET,
        )
        start, end = encode_around(response, b'"choices":[]')
        start += b"["
        for choice in choices:
            if self._wants_logprobs:
                before, after = encode_around(self._whole_choice(choice), b'"logprobs":null')
                yield start + before
                yield from encode_chat_logprobs(choice.scores.tokens, self._tokenizer)
                yield after
            else:
                yield start + encode(self._whole_choice(choice))
            start = b","
        yield b"]" + end

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        assert choice.finish_reason is not None
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(content="".join(choice.texts)),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._wants_ids else UNSET,
            degraded=Degraded(masked_ranges=choice.masked_ranges) if choice.masked_ranges else UNSET,
        )

    def _role_event(self, choice: Choice, usage: Usage | None) -> sse.Event:
        """Opens a choice: its role, before any text."""
        chunk = self._chunk([ChatChunkChoice(index=choice.index, delta=Delta(role="assistant", content=""))], usage)
        if self._wants_ids:
            chunk.prompt_token_ids = choice.prompt.ids
            if len(choice.prompt.ids) > _LARGE_IDS:
                return sse.LargeEvent(lambda: iter([encode(chunk)]))
        return sse.event(chunk)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage if self._wants_usage else UNSET,
        )
