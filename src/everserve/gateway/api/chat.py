"""/v1/chat/completions"""

from collections.abc import Iterator

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from everserve.gateway.api.answers import respond, resume
from everserve.gateway.api.chat_parts import as_delta, as_message
from everserve.gateway.api.depends import NEEDS_KEY, NEEDS_LIMITS, gateway_of
from everserve.gateway.api.openapi import describe
from everserve.gateway.api.preparing import force_usage, prepare_chat
from everserve.gateway.http import sse
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.exchange import read_json
from everserve.gateway.http.requests import ChatRequest
from everserve.gateway.http.responses import (
    TEXT,
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatFinishReason,
    ChatResponse,
    Degraded,
    Delta,
    Usage,
    around,
    encode,
    encode_around,
    split_around,
)
from everserve.gateway.streams.choices import Choice
from everserve.gateway.streams.plain import Around
from everserve.gateway.text.logprobs import (
    chat_logprobs,
    encode_chat_logprobs,
    encode_prompt_logprobs,
    prompt_scores,
)
from everserve.gateway.text.reading.answers import AnswerReader
from everserve.gateway.text.tokenizer import ModelTokenizer
from everserve.tables.outputs import Output

router = APIRouter(dependencies=[NEEDS_KEY, NEEDS_LIMITS])
_decoder = msgspec.json.Decoder(ChatRequest)
_LARGE_IDS = 1 << 13  # they are written by the task that sends them


@router.post("/v1/chat/completions", openapi_extra=describe(ChatResponse, request=ChatRequest, stream=ChatChunk))
async def chat(http_request: Request) -> Response:
    if (rest := await resume(http_request)) is not None:
        return rest
    gateway = gateway_of(http_request)
    request = await read_json(http_request, _decoder)
    force_usage(gateway, request)
    model = gateway.check_model(request.model)
    gateway.check_room(request.n or 1, http_request.state.owner)
    prompt = await prepare_chat(gateway, request)
    id = f"chatcmpl-{http_request.state.request_id}"
    renderer = ChatRenderer(id, http_request.state.created_s, model, request, gateway.tokenizer)
    return respond(http_request, request, renderer, id, [prompt])


class ChatRenderer:
    """Writes answers as messages of the assistant."""

    remembers = False

    def __init__(self, id: str, created_s: int, model: str, request: ChatRequest, tokenizer: ModelTokenizer) -> None:
        self._id = id
        self._model = model
        self._created = created_s
        self._wants_logprobs = bool(request.logprobs)
        self._num_prompt_logprobs = request.prompt_logprobs
        self._wants_ids = bool(request.return_token_ids)
        self._wants_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._tokenizer = tokenizer
        self._readers: dict[int, AnswerReader] = {}  # by choice: their state follows from its text

    def events(self, choice: Choice, text: str, output: Output, usage: Usage | None) -> tuple[sse.Event, ...]:
        is_last = choice.finish_reason is not None
        rendered = ChatChunkChoice(
            index=choice.index,
            delta=self._delta(choice, text, is_last),
            finish_reason=self._finish_reason(choice),
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

    def around(self, choice: Choice) -> Around | None:
        if self._wants_logprobs or self._wants_ids or self._reader(choice) is not None:
            return None
        rendered = ChatChunkChoice(index=choice.index, delta=Delta(content=TEXT))
        return around(self._chunk([rendered], None), b'"content":')

    def ending(self, usage: Usage) -> list[bytes]:
        return [sse.event(self._chunk([], usage)), sse.DONE] if self._wants_usage else [sse.DONE]

    def failure(self, error: HttpError) -> bytes:
        return sse.error_event(error.body())

    def whole(self, choices: list[Choice], usage: Usage) -> Iterator[bytes]:
        response = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[],
            usage=usage,
            prompt_token_ids=choices[0].prompt.ids.tolist() if self._wants_ids else UNSET,
            prompt_logprobs=None if self._num_prompt_logprobs is not None else UNSET,
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
        if self._num_prompt_logprobs is not None:
            before, end = split_around(end, b'"prompt_logprobs":null')
            yield b"]" + before
            scored = prompt_scores(choices[0].prompt.ids, choices[0].scores.prompt, self._num_prompt_logprobs)
            yield from encode_prompt_logprobs(scored, self._tokenizer)
            yield end
        else:
            yield b"]" + end

    def _delta(self, choice: Choice, text: str, is_last: bool) -> Delta:
        reader = self._reader(choice)
        return Delta(content=text) if reader is None else as_delta(reader, reader.push(text, is_last))

    def _finish_reason(self, choice: Choice) -> ChatFinishReason | None:
        """Once the text is read."""
        reader = self._readers.get(choice.index)
        has_called = reader is not None and reader.num_calls > 0
        is_named = choice.prompt.reading is not None and choice.prompt.reading.is_named
        return "tool_calls" if has_called and not is_named and choice.finish_reason == "stop" else choice.finish_reason

    def _reader(self, choice: Choice) -> AnswerReader | None:
        """None: the answer is nothing but text."""
        if choice.prompt.reading is None:
            return None
        if choice.index not in self._readers:
            self._readers[choice.index] = AnswerReader(choice.prompt.reading, f"{self._id}/{choice.index}")
        return self._readers[choice.index]

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        text, reader = "".join(choice.texts), self._reader(choice)
        message = AssistantMessage(content=text)
        if reader is not None:
            message = as_message(reader, reader.push(text, is_last=True))
        finish_reason = self._finish_reason(choice)
        assert finish_reason is not None
        return ChatChoice(
            index=choice.index,
            message=message,
            finish_reason=finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._wants_ids else UNSET,
            degraded=Degraded(masked_ranges=choice.masked_ranges) if choice.masked_ranges else UNSET,
        )

    def _role_event(self, choice: Choice, usage: Usage | None) -> sse.Event:
        """Opens a choice: its role, before any text."""
        chunk = self._chunk([ChatChunkChoice(index=choice.index, delta=Delta(role="assistant", content=""))], usage)
        if self._wants_ids:
            chunk.prompt_token_ids = choice.prompt.ids.tolist()
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
