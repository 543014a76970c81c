"""One client's request: its choices, and the events or the whole answer that are made of them.

Tokens come in through callbacks (`on_text`) and leave through an outbox, which the client's own task empties
(answers.py). A generation outlives the connection of a client that may come back (streams/resumable.py): without a
client it is *suspended*, and nothing is computed for it.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET

from everserve.errors import EverserveError
from everserve.gateway.gateway import Gateway
from everserve.gateway.http import sse
from everserve.gateway.http.errors import from_exception
from everserve.gateway.http.requests import ChatRequest, CompletionRequest
from everserve.gateway.http.responses import PromptTokensDetails, Usage
from everserve.gateway.streams.choices import Choice, TextOptions
from everserve.gateway.streams.outbox import Outbox
from everserve.gateway.streams.tracing import NOT_TRACED, RequestTrace
from everserve.gateway.text.prompts import Prompt
from everserve.gateway.text.sampling import check_prompt_size, choice_seed, num_logprobs, sampling_params
from everserve.tables.outputs import Output
from everserve.tables.requests import RequestSpec, as_tokens

_LARGE = 1 << 12  # tokens and scores in an answer


class Renderer(Protocol):
    """How one endpoint writes answers down."""

    def events(self, choice: Choice, text: str, output: Output, usage: Usage | None) -> Sequence[sse.Event]:
        """One token of a stream."""
        ...

    def last_event(self, usage: Usage) -> bytes:
        """The event with the usage, after all choices have ended."""
        ...

    def whole(self, choices: list[Choice], usage: Usage) -> Iterator[bytes]:
        """The whole answer, in pieces that take about a millisecond each."""
        ...


class Generation:
    """The choices of one request, from `open` to `close`."""

    def __init__(
        self,
        gateway: Gateway,
        request: CompletionRequest | ChatRequest,
        renderer: Renderer,
        id: str,
        may_see: str,
        prompts: list[Prompt],
        outbox: Outbox,
        trace: RequestTrace = NOT_TRACED,
    ) -> None:
        options = request.stream_options
        self.outbox = outbox
        self._gateway = gateway
        self._request = request
        self._renderer = renderer
        self._id = id
        self._may_see = may_see  # its id in events (http/access.py)
        self._prompts = prompts
        self._trace = trace
        self._is_stream = bool(request.stream)
        self._wants_usage = options is not None and bool(options.include_usage)
        self._wants_usage_always = options is not None and bool(options.continuous_usage_stats) and self._wants_usage
        self._choices: list[Choice] = []
        self.num_open = 0  # choices that have not ended
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0  # of all choices, so far
        self._num_masked_tokens = 0  # of these, sampled while experts were masked
        self._num_cached_tokens = 0  # of all prompts, each counted once

    @property
    def num_tokens(self) -> int:
        """Of all prompts and choices, so far."""
        return self._num_prompt_tokens + self._num_completion_tokens

    def open(self, arrived_s: float) -> None:
        """Make a stream of each choice of each prompt, and submit them together or not at all."""
        gateway, request = self._gateway, self._request
        num_choices = request.n or 1
        gateway.check_room(len(self._prompts) * num_choices)
        limits = gateway.limits()
        text_options = TextOptions.of(request)
        seed, has_seed = gateway.seeds.for_request(request), request.seed is not None
        choices: list[Choice] = []
        for prompt in self._prompts:
            check_prompt_size(request, len(prompt.ids), len(prompt.text or ""))
            params = sampling_params(request, len(prompt.ids), limits, gateway.defaults)
            self._num_prompt_tokens += len(prompt.ids)
            tokens = as_tokens(prompt.ids)
            for i in range(num_choices):
                index = len(choices)
                spec = RequestSpec(
                    id=self._stream_id(index),
                    prompt=tokens,
                    # A client's seed means the same for each prompt; without one, equal prompts must differ.
                    params=msgspec.structs.replace(params, seed=choice_seed(seed, i if has_seed else index)),
                )
                choices.append(
                    Choice(
                        index=index,
                        spec=spec,
                        prompt=prompt,
                        fleet=gateway.fleet,
                        owner=self,
                        tokenizer=gateway.tokenizer,
                        options=text_options,
                        arrived_s=arrived_s,
                    )
                )
        self._choices, self.num_open = choices, len(choices)
        self._trace.begin(request, gateway.check_model(request.model), self._id, choices, arrived_s)
        for start in range(0, len(choices), num_choices):
            gateway.fleet.submit([choice.stream for choice in choices[start : start + num_choices]])

    def close(self) -> None:
        """Cancel what has not ended: no client will read it."""
        for choice in reversed(self._choices):  # last come first: a place that becomes free is not for one of them
            choice.cancel()
        self._trace.end()

    def suspend(self) -> None:
        """The client is away: take the streams from their workers, and keep their tokens."""
        for choice in reversed(self._choices):
            choice.suspend()
        self._trace.disconnected()

    def resume(self) -> None:
        """The client is back: the streams go on."""
        choices = [choice for choice in self._choices if not choice.has_ended]
        streams = [choice.resume(self._stream_id(choice.index)) for choice in choices]
        self._trace.resumed()
        self._gateway.fleet.resume(streams)

    def on_text(self, choice: Choice, text: str, output: Output) -> None:
        """A choice has one more token."""
        self._trace.token(choice, output)
        if output.token is not None:
            self._num_completion_tokens += 1
            self._num_masked_tokens += output.masked is not None
        if output.index == 0 and choice.index % (self._request.n or 1) == 0:
            self._num_cached_tokens += output.num_cached
        if choice.finish_reason is not None:
            self.num_open -= 1
        if self._is_stream:
            usage = self._usage() if self._wants_usage_always else None
            self.outbox.put(self._renderer.events(choice, text, output, usage))
            if self.num_open == 0:
                self.outbox.put(self._ending())
                self.outbox.finish()
            return
        choice.texts.append(text)
        if output.prompt_logprobs is not None:
            choice.scores.prompt = output.prompt_logprobs
        if output.token is not None and output.logprobs is not None:
            choice.scores.add(output.token, output.logprobs, choice.offset)
        if self.num_open == 0:
            self.outbox.finish()

    def on_failure(self, error: EverserveError) -> None:
        """One choice broke, so the answer cannot be completed."""
        self._trace.failed(error)
        self.outbox.fail(from_exception(error))

    async def whole(self) -> list[bytes]:
        """The whole answer, for a client that does not want a stream."""
        pieces = self._renderer.whole(self._choices, self._usage())
        return await self._gateway.slices.run(pieces) if self._is_large() else [b"".join(pieces)]

    def _is_large(self) -> bool:
        """Whether writing it down takes longer than about a millisecond."""
        request = self._request
        has_prompts = request.return_token_ids or (isinstance(request, CompletionRequest) and request.echo)
        num_tokens = self._num_prompt_tokens * (request.n or 1) if has_prompts else 0
        num_tokens += self._num_completion_tokens
        return num_tokens * (1 + (num_logprobs(request) or 0)) > _LARGE

    def _ending(self) -> list[bytes]:
        return [self._renderer.last_event(self._usage()), sse.DONE] if self._wants_usage else [sse.DONE]

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self.num_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached_tokens),
            masked_tokens=self._num_masked_tokens or UNSET,
        )

    def _stream_id(self, index: int) -> str:
        return self._gateway.stream_id(f"{self._id}-{index}", self._may_see)
