"""The response to one client's request: its choices, and the hand-off to the task that writes to the client.

Tokens come in through callbacks (`on_text`) and leave through the client's own task (`__call__`). In between is a list
of encoded events and one future: a task is woken once however many events are ready, and not at all before the end
if the client wants the whole answer.
"""

import asyncio
from typing import Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from everserve.errors import EverserveError
from everserve.gateway import sse
from everserve.gateway.choices import Choice, TextOptions
from everserve.gateway.errors import HttpError, from_exception
from everserve.gateway.gateway import Gateway
from everserve.gateway.http import JsonResponse, watch_disconnect
from everserve.gateway.prompts import Prompt
from everserve.gateway.protocol import ChatRequest, CompletionRequest
from everserve.gateway.responses import PromptTokensDetails, Usage
from everserve.gateway.sampling import choice_seed, sampling_params
from everserve.tables.outputs import Output
from everserve.tables.requests import RequestSpec

_MAX_PENDING_EVENTS = 1 << 16  # a client so far behind is not reading


class Renderer(Protocol):
    """How one endpoint writes answers down."""

    def event(self, choice: Choice, text: str, output: Output, usage: Usage | None) -> bytes:
        """One token of a stream."""
        ...

    def last_event(self, usage: Usage) -> bytes:
        """The event with the usage, after all choices have ended."""
        ...

    def whole(self, choices: list[Choice], usage: Usage) -> msgspec.Struct: ...


class Generation(sse.EventStream):
    """Everything between one client's request and the end of its response, be that a stream or one JSON object."""

    def __init__(
        self,
        gateway: Gateway,
        request: CompletionRequest | ChatRequest,
        renderer: Renderer,
        id: str,
        prompts: list[Prompt],
    ) -> None:
        super().__init__()
        options = request.stream_options
        self._gateway = gateway
        self._request = request
        self._renderer = renderer
        self._id = id
        self._prompts = prompts
        self._is_stream = bool(request.stream)
        self._wants_usage = options is not None and options.include_usage
        self._wants_usage_always = options is not None and options.continuous_usage_stats and self._wants_usage
        self._choices: list[Choice] = []
        self._num_open = 0
        self._num_prompt_tokens = 0
        self._pending: list[bytes] = []
        self._error: HttpError | None = None
        self._client_is_gone = False
        self._waiter: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request and write its response."""
        self._gateway.num_requests += 1
        self._task = asyncio.current_task()
        try:
            self._submit(arrived_s=scope["state"]["arrived_s"])
            with watch_disconnect(receive, self._on_disconnect):
                if self._is_stream:
                    await self._stream(send, send_body=scope["state"]["send_body"])
                elif (whole := await self._whole()) is not None:
                    await JsonResponse(whole)(scope, receive, send)
        finally:
            self._gateway.num_requests -= 1
            for choice in self._choices:
                choice.cancel()

    def on_text(self, choice: Choice, text: str, output: Output) -> None:
        """A choice has one more token."""
        if choice.finish_reason is not None:
            self._num_open -= 1
        if self._is_stream:
            usage = self._usage() if self._wants_usage_always else None
            self._pending.append(self._renderer.event(choice, text, output, usage))
            if len(self._pending) > _MAX_PENDING_EVENTS:
                self._abandon()
            self._wake()
            return
        choice.texts.append(text)
        if output.prompt_logprobs is not None:
            choice.scored.extend(zip(choice.prompt.ids, output.prompt_logprobs, strict=True))
        if output.token is not None and output.logprobs is not None:
            choice.scored.append((output.token, output.logprobs))
        if self._num_open == 0:
            self._wake()

    def on_failure(self, error: EverserveError) -> None:
        """One choice broke, so the answer cannot be completed."""
        if self._error is None:
            self._error = from_exception(error)
        self._wake()

    def _submit(self, arrived_s: float) -> None:
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
                    id=gateway.stream_id(f"{self._id}-{index}"),
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
        self._choices, self._num_open = choices, len(choices)
        for start in range(0, len(choices), num_choices):
            gateway.fleet.submit([choice.stream for choice in choices[start : start + num_choices]])

    async def _whole(self) -> msgspec.Struct | None:
        """The whole answer; None if the client has left."""
        while self._num_open and not self._error and not self._client_is_gone:
            await self._changed()
        if self._client_is_gone:
            return None
        if self._error:
            raise self._error
        return self._renderer.whole(self._choices, self._usage())

    async def _stream(self, send: Send, send_body: Send) -> None:
        """The status line waits for the first token, so that a request that cannot run gets its true status."""
        has_started = is_last = False
        while not is_last:
            while not self._pending and self._num_open and not self._error and not self._client_is_gone:
                await self._changed()
            if self._client_is_gone:
                return
            if not has_started:
                if self._error and not self._pending:
                    raise self._error
                await self.start(send)
                has_started = True
            events, self._pending = self._pending, []
            if self._error:
                events.append(sse.error_event(self._error.body()))
            elif self._num_open == 0:
                events.append(self._ending())
            is_last = self._num_open == 0 or self._error is not None
            await send_body({"type": "http.response.body", "body": b"".join(events), "more_body": not is_last})

    def _ending(self) -> bytes:
        return (self._renderer.last_event(self._usage()) if self._wants_usage else b"") + sse.DONE

    def _usage(self) -> Usage:
        num_completion = sum(choice.num_tokens for choice in self._choices)
        firsts = self._choices[:: self._request.n or 1]
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=num_completion,
            total_tokens=self._num_prompt_tokens + num_completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(choice.num_cached for choice in firsts)),
        )

    def _abandon(self) -> None:
        """The client does not read, so its task hangs in a write: free everything and end that task."""
        self._pending.clear()
        for choice in self._choices:
            choice.cancel()
        if self._task is not None:
            self._task.cancel()

    def _on_disconnect(self) -> None:
        self._client_is_gone = True
        self._wake()

    async def _changed(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
