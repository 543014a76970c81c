"""/v1/completions"""

import itertools
from collections.abc import Iterable, Iterator

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from everserve.gateway.api.answers import respond, resume
from everserve.gateway.api.depends import NEEDS_KEY, NEEDS_LIMITS, gateway_of
from everserve.gateway.api.openapi import describe
from everserve.gateway.api.preparing import force_usage, prepare_completion
from everserve.gateway.http import sse
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.exchange import read_json
from everserve.gateway.http.requests import CompletionRequest
from everserve.gateway.http.responses import (
    TEXT,
    CompletionChoice,
    CompletionResponse,
    Degraded,
    Usage,
    around,
    encode,
    encode_around,
    split_around,
)
from everserve.gateway.streams.choices import Choice, Scores
from everserve.gateway.streams.plain import Around
from everserve.gateway.text.logprobs import (
    Scored,
    completion_logprobs,
    encode_completion_logprobs,
    encode_prompt_logprobs,
    prompt_scores,
    text_offsets,
)
from everserve.gateway.text.prompts import num_prompts
from everserve.gateway.text.sampling import check_combinations, num_generated
from everserve.gateway.text.tokenizer import ModelTokenizer
from everserve.tables.outputs import Output

router = APIRouter(dependencies=[NEEDS_KEY, NEEDS_LIMITS])
_decoder = msgspec.json.Decoder(CompletionRequest)
_LARGE_TEXT = 1 << 16
_LARGE_SCORES = 1 << 11
_LARGE_IDS = 1 << 13


@router.post(
    "/v1/completions",
    openapi_extra=describe(CompletionResponse, request=CompletionRequest, stream=CompletionResponse),
)
async def complete(http_request: Request) -> Response:
    if (rest := await resume(http_request)) is not None:
        return rest
    gateway = gateway_of(http_request)
    request = await read_json(http_request, _decoder)
    force_usage(gateway, request)
    model = gateway.check_model(request.model)
    check_combinations(request)
    gateway.check_room(num_prompts(request) * num_generated(request), http_request.state.owner)
    prompts = await prepare_completion(gateway, request)
    echoed: list[str] = []
    if request.echo:
        skip = request.skip_special_tokens is not False
        echoed = [
            prompt.text if prompt.text is not None else await gateway.tokenizer.decode(prompt.ids, skip)
            for prompt in prompts
        ]
    id = f"cmpl-{http_request.state.request_id}"
    renderer = CompletionRenderer(id, http_request.state.created_s, model, request, gateway.tokenizer, echoed)
    return respond(http_request, request, renderer, id, prompts)


class CompletionRenderer:
    """Writes answers as text completions."""

    remembers = False

    def __init__(
        self,
        id: str,
        created_s: int,
        model: str,
        request: CompletionRequest,
        tokenizer: ModelTokenizer,
        echoed: list[str],
    ) -> None:
        self._id = id
        self._model = model
        self._created = created_s
        self._num_choices = num_generated(request)
        self._wants_logprobs = request.logprobs is not None
        self._num_logprobs = request.logprobs or 0
        self._num_prompt_logprobs = request.prompt_logprobs
        self._wants_ids = bool(request.return_token_ids)
        self._wants_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._tokenizer = tokenizer
        self._echoed = echoed  # the prompts' texts, if the client wants to see them again

    def events(self, choice: Choice, text: str, output: Output, usage: Usage | None) -> tuple[sse.Event, ...]:
        is_first = output.index == 0
        if is_first and self._echoed:
            text = self._prompt_text(choice) + text
        rendered = CompletionChoice(
            index=choice.index, text=text, finish_reason=choice.finish_reason, stop_reason=choice.stop_reason
        )
        if output.masked is not None:
            rendered.degraded = Degraded(masked_ranges=[(output.index, output.index + 1)])
        if self._wants_ids:
            rendered.token_ids = [] if output.token is None else [output.token]
            if is_first:
                rendered.prompt_token_ids = choice.prompt.ids.tolist()
        scores = Scores(prompt=output.prompt_logprobs)
        if output.token is not None:
            scores.add(output.token, output.logprobs, choice.offset)
        response = self._response([], usage if self._wants_usage else UNSET)
        if is_first and self._is_large(choice, text):
            return (sse.LargeEvent(lambda: self._pieces(response, [(choice, rendered, scores)])),)
        if self._wants_logprobs:
            scored, offsets = self._scored(choice, scores)
            rendered.logprobs = completion_logprobs(scored, offsets, self._tokenizer)
        response.choices.append(rendered)
        return (sse.event(response),)

    def around(self, choice: Choice) -> Around | None:
        if self._wants_logprobs or self._wants_ids:
            return None
        rendered = CompletionChoice(index=choice.index, text=TEXT)
        return around(self._response([rendered], None if self._wants_usage else UNSET), b'"text":')

    def ending(self, usage: Usage) -> list[bytes]:
        return [sse.event(self._response([], usage)), sse.DONE] if self._wants_usage else [sse.DONE]

    def failure(self, error: HttpError) -> bytes:
        return sse.error_event(error.body())

    def whole(self, choices: list[Choice], usage: Usage) -> Iterator[bytes]:
        parts = ((choice, self._whole_choice(index, choice), choice.scores) for index, choice in enumerate(choices))
        return self._pieces(self._response([], usage), parts)

    def _whole_choice(self, index: int, choice: Choice) -> CompletionChoice:
        text = "".join(choice.texts)
        return CompletionChoice(
            index=index,
            text=self._prompt_text(choice) + text if self._echoed else text,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._wants_ids else UNSET,
            prompt_token_ids=choice.prompt.ids.tolist() if self._wants_ids else UNSET,
            prompt_logprobs=None if self._num_prompt_logprobs is not None else UNSET,
            degraded=Degraded(masked_ranges=choice.masked_ranges) if choice.masked_ranges else UNSET,
        )

    def _pieces(
        self, response: CompletionResponse, parts: Iterable[tuple[Choice, CompletionChoice, Scores]]
    ) -> Iterator[bytes]:
        """The JSON of a response without its choices, and these in it. Their logprobs are written here."""
        start, end = encode_around(response, b'"choices":[]')
        start += b"["
        for choice, rendered, scores in parts:
            yield start
            rest = encode(rendered)
            if self._wants_logprobs:
                before, rest = split_around(rest, b'"logprobs":null')
                yield before
                scored, offsets = self._scored(choice, scores)
                yield from encode_completion_logprobs(scored, offsets, self._tokenizer)
            if self._num_prompt_logprobs is not None:
                before, rest = split_around(rest, b'"prompt_logprobs":null')
                yield before
                of_prompt = prompt_scores(choice.prompt.ids, scores.prompt, self._num_prompt_logprobs)
                yield from encode_prompt_logprobs(of_prompt, self._tokenizer)
            yield rest
            start = b","
        yield b"]" + end

    def _scored(self, choice: Choice, scores: Scores) -> tuple[list[Scored], Iterator[int]]:
        """The tokens that have scores, the echoed prompt's first, and where their texts begin."""
        prompt_text = self._prompt_text(choice) if self._echoed else ""
        prompt = prompt_scores(choice.prompt.ids, scores.prompt, self._num_logprobs) if self._echoed else []
        prompt_offsets = text_offsets(prompt_text, choice.prompt.ids, self._tokenizer) if prompt else iter(())
        offsets = (len(prompt_text) + offset for offset in scores.offsets)
        return prompt + scores.tokens, itertools.chain(prompt_offsets, offsets)

    def _is_large(self, choice: Choice, text: str) -> bool:
        """Whether the first event of a choice takes longer than about a millisecond: it may have the prompt in it."""
        num_prompt_scores = len(choice.prompt.ids) * (1 + self._num_logprobs) if self._echoed else 0
        num_ids = len(choice.prompt.ids) if self._wants_ids else 0
        return len(text) > _LARGE_TEXT or num_prompt_scores > _LARGE_SCORES or num_ids > _LARGE_IDS

    def _prompt_text(self, choice: Choice) -> str:
        return self._echoed[choice.index // self._num_choices]

    def _response(self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None) -> CompletionResponse:
        return CompletionResponse(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
