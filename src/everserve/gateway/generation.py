"""One client's request: its choices, and the events or the whole answer that are made of them.

Tokens come in through callbacks (`on_text`) and leave through an outbox, which the client's own task empties
(answers.py). A generation outlives the connection of a client that may come back (keeping.py): without a client it is
*suspended*, and nothing is computed for it.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from everserve.errors import EverserveError
from everserve.gateway import sse
from everserve.gateway.choices import Choice, TextOptions
from everserve.gateway.errors import from_exception
from everserve.gateway.gateway import Gateway
from everserve.gateway.outbox import Outbox
from everserve.gateway.prompts import Prompt
from everserve.gateway.protocol import ChatRequest, CompletionRequest
from everserve.gateway.responses import PromptTokensDetails, Usage
from everserve.gateway.sampling import choice_seed, sampling_params
from everserve.gateway.tracing import NOT_TRACED, RequestTrace
from everserve.tables.outputs import Output
from everserve.tables.requests import RequestSpec


class Renderer(Protocol):
    """How one endpoint writes answers down."""

    def events(self, choice: Choice, text: str, output: Output, usage: Usage | None) -> Sequence[bytes]:
        """One token of a stream."""
        ...

    def last_event(self, usage: Usage) -> bytes:
        """The event with the usage, after all choices have ended."""
        ...

    def whole(self, choices: list[Choice], usage: Usage) -> msgspec.Struct: ...


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
        self._may_see = may_see  # its id in events (stream_ids.py)
        self._prompts = prompts
        self._trace = trace
        self._is_stream = bool(request.stream)
        self._wants_usage = options is not None and bool(options.include_usage)
        self._wants_usage_always = options is not None and bool(options.continuous_usage_stats) and self._wants_usage
        self._choices: list[Choice] = []
        self.num_open = 0  # choices that have not ended
        self._num_prompt_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Of all prompts and choices, so far."""
        return self._num_prompt_tokens + sum(choice.num_tokens for choice in self._choices)

    def open(self, arrived_s: float) -> None:
        """Make a stream of each choice of each prompt, and submit them together or not at all."""
        gateway, request = self._gateway, self._request
        num_choices = request.n or 1
        gateway.fleet.check_room(len(self._prompts) * num_choices)
        limits = gateway.limits()
        text_options = TextOptions.of(request)
        seed = gateway.seeds.for_request(request)
        choices: list[Choice] = []
        for prompt in self._prompts:
            params = sampling_params(request, len(prompt.ids), limits, gateway.defaults)
            self._num_prompt_tokens += len(prompt.ids)
            for i in range(num_choices):
                index = len(choices)
                spec = RequestSpec(
                    id=self._stream_id(index),
                    prompt=prompt.ids,
                    params=msgspec.structs.replace(params, seed=choice_seed(seed, i)),
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
        """Nobody waits for the rest, if there is one."""
        for choice in self._choices:
            choice.cancel()
        self._trace.end()

    def suspend(self) -> None:
        """Nobody waits for the rest now."""
        for choice in self._choices:
            choice.suspend()
        self._trace.disconnected()

    def resume(self) -> None:
        """Somebody does again."""
        choices = [choice for choice in self._choices if not choice.has_ended]
        streams = [choice.resume(self._stream_id(choice.index)) for choice in choices]
        self._trace.resumed()
        self._gateway.fleet.resume(streams)

    def on_text(self, choice: Choice, text: str, output: Output) -> None:
        """A choice has one more token."""
        self._trace.token(choice, output)
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
            choice.scored.extend(zip(choice.prompt.ids, output.prompt_logprobs, strict=True))
        if output.token is not None and output.logprobs is not None:
            choice.scored.append((output.token, output.logprobs))
        if self.num_open == 0:
            self.outbox.finish()

    def on_failure(self, error: EverserveError) -> None:
        """One choice broke, so the answer cannot be completed."""
        self._trace.failed(error)
        self.outbox.fail(from_exception(error))

    def whole(self) -> msgspec.Struct:
        """The whole answer, for a client that does not want a stream."""
        return self._renderer.whole(self._choices, self._usage())

    def _ending(self) -> list[bytes]:
        return [self._renderer.last_event(self._usage()), sse.DONE] if self._wants_usage else [sse.DONE]

    def _usage(self) -> Usage:
        num_completion = sum(choice.num_tokens for choice in self._choices)
        firsts = self._choices[:: self._request.n or 1]
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=num_completion,
            total_tokens=self._num_prompt_tokens + num_completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(choice.num_cached for choice in firsts)),
        )

    def _stream_id(self, index: int) -> str:
        return self._gateway.stream_id(f"{self._id}-{index}", self._may_see)
