"""/v1/completions"""

import time

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from everserve.gateway import sse
from everserve.gateway.answers import respond, resume
from everserve.gateway.choices import Choice
from everserve.gateway.depends import NEEDS_KEY, NEEDS_LIMITS, gateway_of
from everserve.gateway.http import read_json
from everserve.gateway.logprobs import Scored, completion_logprobs
from everserve.gateway.openapi import describe
from everserve.gateway.prompts import completion_prompts, num_prompts
from everserve.gateway.protocol import CompletionRequest
from everserve.gateway.responses import CompletionChoice, CompletionLogprobs, CompletionResponse, Usage
from everserve.gateway.sampling import check_combinations
from everserve.gateway.tokenizer import ModelTokenizer
from everserve.tables.outputs import Output

router = APIRouter(dependencies=[NEEDS_KEY, NEEDS_LIMITS])
_decoder = msgspec.json.Decoder(CompletionRequest)


@router.post(
    "/v1/completions",
    openapi_extra=describe(CompletionResponse, request=CompletionRequest, stream=CompletionResponse),
)
async def complete(http_request: Request) -> Response:
    if (rest := resume(http_request)) is not None:
        return rest
    gateway = gateway_of(http_request)
    request = await read_json(http_request, _decoder)
    model = gateway.check_model(request.model)
    check_combinations(request)
    gateway.fleet.check_room(num_prompts(request) * (request.n or 1))
    prompts = await completion_prompts(request, gateway.tokenizer, gateway.limits())
    echoed: list[str] = []
    if request.echo:
        skip = request.skip_special_tokens is not False
        echoed = [
            prompt.text if prompt.text is not None else await gateway.tokenizer.decode(prompt.ids, skip)
            for prompt in prompts
        ]
    id = f"cmpl-{http_request.state.request_id}"
    renderer = CompletionRenderer(id, model, request, gateway.tokenizer, echoed)
    return respond(http_request, request, renderer, id, prompts)


class CompletionRenderer:
    """Writes answers as text completions."""

    def __init__(
        self, id: str, model: str, request: CompletionRequest, tokenizer: ModelTokenizer, echoed: list[str]
    ) -> None:
        self._id = id
        self._model = model
        self._created = int(time.time())
        self._num_choices = request.n or 1
        self._wants_logprobs = request.logprobs is not None
        self._wants_ids = bool(request.return_token_ids)
        self._wants_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._tokenizer = tokenizer
        self._echoed = echoed  # the prompts' texts, if the client wants to see them again

    def events(self, choice: Choice, text: str, output: Output, usage: Usage | None) -> tuple[bytes, ...]:
        if output.index == 0 and self._echoed:
            text = self._prompt_text(choice) + text
        rendered = CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=self._event_logprobs(choice, output) if self._wants_logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if self._wants_ids:
            rendered.token_ids = [] if output.token is None else [output.token]
            if output.index == 0:
                rendered.prompt_token_ids = choice.prompt.ids
        return (sse.event(self._response([rendered], usage if self._wants_usage else UNSET)),)

    def last_event(self, usage: Usage) -> bytes:
        return sse.event(self._response([], usage))

    def whole(self, choices: list[Choice], usage: Usage) -> CompletionResponse:
        return self._response([self._whole_choice(choice) for choice in choices], usage)

    def _whole_choice(self, choice: Choice) -> CompletionChoice:
        text = "".join(choice.texts)
        return CompletionChoice(
            index=choice.index,
            text=self._prompt_text(choice) + text if self._echoed else text,
            logprobs=completion_logprobs(choice.scored, self._tokenizer, 0) if self._wants_logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._wants_ids else UNSET,
            prompt_token_ids=choice.prompt.ids if self._wants_ids else UNSET,
        )

    def _event_logprobs(self, choice: Choice, output: Output) -> CompletionLogprobs:
        """The logprobs of one event: one token's, and the prompt's before the first if it is echoed."""
        scored: list[Scored] = []
        if output.prompt_logprobs is not None:
            scored.extend(zip(choice.prompt.ids, output.prompt_logprobs, strict=True))
        if output.token is not None:
            scored.append((output.token, output.logprobs))
        logprobs = completion_logprobs(scored, self._tokenizer, choice.next_offset)
        choice.next_offset += sum(map(len, logprobs.tokens))
        return logprobs

    def _prompt_text(self, choice: Choice) -> str:
        return self._echoed[choice.index // self._num_choices]

    def _response(self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None) -> CompletionResponse:
        return CompletionResponse(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
