"""One client's request: its choices, and the events or the whole answer that are made of them.

Tokens come in through callbacks (`on_text`) and leave through an outbox, which the client's own task empties
(answers.py). A generation outlives the connection of a client that may come back (streams/resumable.py): without a
client it is *suspended*, and nothing is computed for it.

It outlives its gateway, too: its journal (streams/journal.py) is in the ledger. The next gateway reads the request
again, makes the same choices of it, and replays what they had said; then their streams go on.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET

from everserve.errors import EverserveError
from everserve.gateway.gateway import Gateway
from everserve.gateway.http import sse
from everserve.gateway.http.errors import HttpError, from_exception
from everserve.gateway.http.memory import Hold
from everserve.gateway.http.recorded import Birth, Position, Recorded
from everserve.gateway.http.requests import ChatRequest, CompletionRequest
from everserve.gateway.http.responses import PromptTokensDetails, Usage
from everserve.gateway.http.transport import LedgerTransport
from everserve.gateway.streams.choices import Choice, TextOptions, best_choices
from everserve.gateway.streams.journal import Failed, Journal, Placed, Said
from everserve.gateway.streams.outbox import Outbox
from everserve.gateway.streams.plain import Around, PlainStream
from everserve.gateway.streams.tracing import NOT_TRACED, RequestTrace
from everserve.gateway.text.prompts import Prompt
from everserve.gateway.text.sampling import (
    check_prompt_size,
    choice_seed,
    hash_salt,
    num_generated,
    num_logprobs,
    sampling_params,
)
from everserve.ledger.requests import KEPT
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.tables.outputs import Output
from everserve.tables.requests import Flow, RequestSpec

_LARGE = 1 << 12  # tokens and scores in an answer
_TOKEN_BYTES = 4  # of a prompt ...
_NUMBER_BYTES = 36  # ... and where the client has sent it as a number


class Renderer(Protocol):
    """How one endpoint writes answers down: a function of the request, of what is recorded of it (http/recorded.py) and
    of the outputs so far, so that another gateway can go on with it."""

    remembers: bool  # an event depends on what was written before; else only on the choice

    def events(self, choice: Choice, text: str, output: Output, usage: Usage | None) -> Sequence[sse.Event]:
        """One token of a stream."""
        ...

    def around(self, choice: Choice) -> Around | None:
        """An event before and after its text, if from the second token on events of this choice differ in nothing else
        until it ends."""
        ...

    def ending(self, usage: Usage) -> list[bytes]:
        """What follows in a stream after all choices have ended."""
        ...

    def failure(self, error: HttpError) -> bytes:
        """The last event of a stream that broke."""
        ...

    def whole(self, choices: list[Choice], usage: Usage) -> Iterator[bytes]:
        """The whole answer, in pieces that take about a millisecond each."""
        ...


class Exchange(Protocol):
    """The HTTP request and its connection, as far as they matter here (answers.py)."""

    recorded: Recorded | None  # an earlier gateway has begun it
    is_kept: bool  # its client may come back for it on another connection

    @property
    def position(self) -> Position:
        """How far its answer was written, then."""
        ...

    @property
    def has_head(self) -> bool:
        """The status was sent, then."""
        ...

    def birth(self, seed: int, arrived_s: float) -> Birth:
        """What must be known to begin it again."""
        ...

    def begin(self, reference: int) -> None:
        """It is written down under this reference."""
        ...

    def handle(self) -> None:
        """Something is made of its answer now."""
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
        flow: Flow,
        held: Hold,
        prompts: list[Prompt],
        outbox: Outbox,
        exchange: "Exchange",
        trace: RequestTrace = NOT_TRACED,
    ) -> None:
        options = request.stream_options
        self._exchange = exchange
        self._recorded = exchange.recorded
        self.journal = Journal(None, None)
        self.outbox = outbox
        self._gateway = gateway
        self._request = request
        self._renderer = renderer
        self._id = id
        self._may_see = may_see  # its id in events (http/access.py)
        self._flow = flow
        self._held = held
        self._prompts = prompts
        self._trace = trace
        self._is_stream = bool(request.stream)
        self._wants_usage_always = options is not None and bool(
            options.continuous_usage_stats and options.include_usage
        )
        self._choices: list[Choice] = []
        self.num_open = 0  # choices that have not ended
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0  # of all choices, so far
        self._num_masked_tokens = 0  # of these, sampled while experts were masked
        self._around: Around | None = None  # of a plain stream's events; found when the first ones are sent
        self._num_cached_tokens = 0  # of all prompts, each counted once

    @property
    def num_tokens(self) -> int:
        """The tokens of all prompts and choices, so far."""
        return self._num_prompt_tokens + self._num_completion_tokens

    def open(self, arrived_s: float) -> None:
        """Make a stream of each choice of each prompt, and submit them together or not at all. Those that an earlier
        gateway had go on."""
        gateway, request, recorded = self._gateway, self._request, self._recorded
        num_choices = num_generated(request)
        gateway.check_room(len(self._prompts) * num_choices, self._flow.key)
        seed = recorded.birth.seed if recorded is not None else gateway.seeds.for_request(request)
        choices = self._make_choices(seed, arrived_s)
        self._held.set(self._held.num_body_bytes + self._num_prompt_bytes())
        self._held.keep()
        self._choices, self.num_open = choices, len(choices)
        self._trace.begin(request, gateway.check_model(request.model), self._id, choices, arrived_s)
        if recorded is not None:
            self._go_on(recorded)
            return
        self._write_down(seed, arrived_s)
        for start in range(0, len(choices), num_choices):
            gateway.fleet.submit([choice.stream for choice in choices[start : start + num_choices]])

    def _make_choices(self, seed: int, arrived_s: float) -> list[Choice]:
        gateway, request = self._gateway, self._request
        num_choices, has_seed = num_generated(request), request.seed is not None
        limits = gateway.limits()
        text_options = TextOptions.of(request)
        cache_salt = hash_salt(request.cache_salt)
        self._num_prompt_tokens = 0
        choices: list[Choice] = []
        for prompt in self._prompts:
            check_prompt_size(request, len(prompt.ids), len(prompt.text or ""))
            params = sampling_params(request, len(prompt.ids), limits, gateway.defaults)
            self._num_prompt_tokens += len(prompt.ids)
            for i in range(num_choices):
                index = len(choices)
                spec = RequestSpec(
                    id=self._stream_id(index),
                    prompt=prompt.ids,
                    # A client's seed means the same for each prompt; without one, equal prompts must differ.
                    params=msgspec.structs.replace(
                        params,
                        seed=choice_seed(seed, i if has_seed else index),
                        guided=prompt.guided,
                        bad_words=prompt.bad_words,
                    ),
                    flow=self._flow,
                    cache_salt=cache_salt,
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
        return choices

    def _write_down(self, seed: int, arrived_s: float) -> None:
        """What is random or timed in the answer, before anything of it is sent. From now on the next gateway would go
        on with it."""
        ledger = self._gateway.connections.custody.ledger
        self.journal = Journal.begin(ledger, self._exchange.birth(seed, arrived_s), self._exchange.is_kept)
        self._exchange.begin(self.journal.reference)

    def _go_on(self, recorded: Recorded) -> None:
        """Replay what an earlier gateway had, and give workers the streams that have not ended."""
        custody, position = self._gateway.connections.custody, self._exchange.position
        self.journal = Journal(recorded.request, custody.ledger)
        is_made = position.journal > 0 and not self._renderer.remembers  # events of everything up to there
        if is_made:
            self.outbox.begin_at(position.num_events)
        homes: dict[int, Placed] = {}
        for at, entry in self.journal.entries():
            if isinstance(entry, Said):
                choice = self._choices[entry.choice]
                self._count(choice, entry.output)
                text = choice.replay(entry.output)
                self._on_said(choice, text, entry.output, is_wanted=not is_made or at > position.journal)
            elif isinstance(entry, Failed):
                for choice in self._choices:
                    choice.has_ended = True
                self.outbox.fail(entry.error(), self._renderer.failure(entry.error()))
            else:
                homes[entry.choice] = entry
        if not is_made:
            self.outbox.skip(position.num_events)
        if self._exchange.has_head:
            self.outbox.has_begun = True
        recorded.done()
        streams = [choice.stream for choice in self._choices if not choice.has_ended]
        for choice in self._choices:
            if choice.index in homes:
                home = homes[choice.index]
                choice.stream.home = WorkerId(Rank(home.rank), Incarnation(home.incarnation))
        self._gateway.fleet.go_on(streams)

    def events_again(self) -> list[sse.Event]:
        """All events so far, made again of the journal."""
        twin = Generation(
            self._gateway, self._request, self._renderer, self._id, self._may_see, self._flow, self._held,
            self._prompts, Outbox(), self._exchange,
        )  # fmt: skip
        twin._choices = twin._make_choices(0, 0.0)
        twin.num_open = len(twin._choices)
        events: list[sse.Event] = []
        for _, entry in self.journal.entries():
            if isinstance(entry, Said):
                choice = twin._choices[entry.choice]
                twin._count(choice, entry.output)
                text = choice.replay(entry.output)
                events += twin._events_of(choice, text, entry.output)
            elif isinstance(entry, Failed):
                events.append(self._renderer.failure(entry.error()))
        return events

    def _num_prompt_bytes(self) -> int:
        """What is held besides the body: tokens, those that came as numbers in lists, and what a template has made."""
        num_bytes = _TOKEN_BYTES * self._num_prompt_tokens
        for prompt in self._prompts:
            if prompt.text is None:
                num_bytes += _NUMBER_BYTES * len(prompt.ids)
            elif isinstance(self._request, ChatRequest):
                num_bytes += len(prompt.text)
        return num_bytes

    @property
    def is_forgotten(self) -> bool:
        return self._recorded is not None and self._recorded.request.state != KEPT

    def close(self) -> None:
        """Nothing of it is needed any more."""
        self.end()
        self.journal.close()

    def end(self) -> None:
        """Cancel what has not ended: no client will read it."""
        for choice in reversed(self._choices):  # last come first: a place that becomes free is not for one of them
            choice.cancel()
        self._held.release()
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

    def follow(self, transport: LedgerTransport) -> None:
        """All events so far were sent; the next ones are written in C, if they are plain."""
        if self._around is None:
            self._around = self._find_around()
        if any(self._around):
            PlainStream.begin(self._choices[0], self.outbox, self.journal, transport, self._around, self._count_written)

    def _find_around(self) -> Around:
        """Nothing, if there is more to its events than text."""
        is_alone = len(self._choices) == 1 and not (self._wants_usage_always or self._exchange.is_kept)
        around = self._renderer.around(self._choices[0]) if is_alone and self._trace is NOT_TRACED else None
        return around or (b"", b"")

    def _count_written(self, num_tokens: int) -> None:
        self._num_completion_tokens += num_tokens

    def note(self, choice: Choice, output: Output) -> None:
        """Written down first. A choice that was given to another worker since its last token says so then."""
        self._exchange.handle()
        journal = self.journal
        link = choice.stream.link
        if link is not None and choice.stream.home != link.log:
            choice.stream.home = link.log
            journal.note(Placed(choice.index, link.rank, link.incarnation))
        journal.say(choice.index, output)

    def on_text(self, choice: Choice, text: str, output: Output) -> None:
        """A choice has one more token."""
        self._trace.token(choice, output)
        self._count(choice, output)
        self._on_said(choice, text, output)
        if self.num_open == 0:
            self._measure(choice)

    def _count(self, choice: Choice, output: Output) -> None:
        if output.token is not None:
            self._num_completion_tokens += 1
            self._num_masked_tokens += output.masked is not None
        if output.index == 0 and choice.index % num_generated(self._request) == 0:
            self._num_cached_tokens += output.num_cached

    def _events_of(self, choice: Choice, text: str, output: Output) -> list[sse.Event]:
        """Events of this output, and the last ones, if no choice is open any more."""
        usage = self._usage() if self._wants_usage_always else None
        events = [*self._renderer.events(choice, text, output, usage)]
        if choice.finish_reason is not None:
            self.num_open -= 1
        return events if self.num_open else [*events, *self._renderer.ending(self._usage())]

    def _on_said(self, choice: Choice, text: str, output: Output, is_wanted: bool = True) -> None:
        """`is_wanted`: its events have not been made before."""
        if self._is_stream:
            if is_wanted:
                self.outbox.put(self._events_of(choice, text, output))
            elif choice.finish_reason is not None:
                self.num_open -= 1
            if self.num_open == 0:
                self.outbox.finish()
            return
        if choice.finish_reason is not None:
            self.num_open -= 1
        choice.texts.append(text)
        if output.prompt_logprobs is not None:
            choice.scores.prompt = output.prompt_logprobs
        if output.token is not None and output.logprobs is not None:
            choice.scores.add(output.token, output.logprobs, choice.offset)
        if self.num_open == 0:
            self.outbox.finish()

    def _measure(self, last: Choice) -> None:
        """What only the whole request can tell, at the worker of the choice that ended last."""
        metrics = last.stream.metrics
        metrics.num_choices.observe(self._request.n or 1)
        metrics.most_generation_tokens.observe(max(choice.num_tokens for choice in self._choices))

    def on_failure(self, error: EverserveError) -> None:
        """One choice broke, so the answer cannot be completed."""
        self._trace.failed(error)
        told = from_exception(error)
        if not self.outbox.is_finished:
            self.journal.fail(told)
        self.outbox.fail(told, self._renderer.failure(told))

    async def whole(self) -> list[bytes]:
        """The whole answer, for a client that does not want a stream."""
        choices = best_choices(self._choices, num_generated(self._request), self._request.n or 1)
        pieces = self._renderer.whole(choices, self._usage())
        return await self._gateway.slices.run(pieces) if self._is_large() else [b"".join(pieces)]

    def _is_large(self) -> bool:
        """Whether writing it down takes longer than about a millisecond."""
        request = self._request
        has_prompts = request.return_token_ids or (isinstance(request, CompletionRequest) and request.echo)
        num_tokens = self._num_prompt_tokens * num_generated(request) if has_prompts else 0
        num_tokens += self._num_completion_tokens
        num_scores = num_tokens * (1 + (num_logprobs(request) or 0))
        if request.prompt_logprobs is not None:
            num_scores += self._num_prompt_tokens * num_generated(request) * (1 + request.prompt_logprobs)
        return num_scores > _LARGE

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
