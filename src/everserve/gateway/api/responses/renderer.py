"""Writes what a generation says as one response (api/generation.py: Renderer)."""

import time
from collections.abc import Callable, Iterable, Iterator

from msgspec import UNSET, UnsetType

from everserve.gateway.api.responses.view import (
    ResponseEvent,
    ResponseInputDetails,
    ResponseOutputDetails,
    ResponseUsage,
    ResponseView,
)
from everserve.gateway.api.responses.writer import Writer, snapshot
from everserve.gateway.http import sse
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.responses import Degraded, TokenLogprob, Usage
from everserve.gateway.streams.choices import Choice
from everserve.gateway.streams.plain import Around
from everserve.gateway.text.logprobs import chat_logprobs
from everserve.gateway.text.reading.answers import AnswerReader, Reading
from everserve.gateway.text.reading.parts import Argued, Called, Said, Thought
from everserve.gateway.text.tokenizer import ModelTokenizer
from everserve.tables.outputs import Output

OnEnd = Callable[[bytes], None]  # the whole response as JSON


class ResponsesRenderer:
    """Renders one response, which has one choice."""

    remembers = True

    def __init__(
        self,
        view: ResponseView,
        wants_logprobs: bool,
        tokenizer: ModelTokenizer,
        on_end: OnEnd = lambda view: None,
    ) -> None:
        self._writer = Writer(view)
        self._wants_logprobs = wants_logprobs
        self._tokenizer = tokenizer
        self._on_end = on_end
        self._choice: Choice | None = None
        self._reader: AnswerReader | None = None
        self._num_called = 0

    def events(self, choice: Choice, text: str, output: Output, usage: Usage | None) -> list[sse.Event]:
        self._choice = choice
        events: list[sse.Event] = list(map(_encode, self._writer.begin()))
        degraded: Degraded | UnsetType = UNSET
        if output.masked is not None:
            degraded = Degraded(masked_ranges=[(output.index, output.index + 1)])
        logprobs = None
        if self._wants_logprobs and output.token is not None:
            logprobs = chat_logprobs([(output.token, output.logprobs)], self._tokenizer).content
        for step in self._write(choice, text, choice.finish_reason is not None, logprobs, degraded):
            events += map(_encode, step)
        return events

    def around(self, choice: Choice) -> Around | None:
        """Each event depends on what was written before."""
        return None

    def ending(self, usage: Usage) -> list[bytes]:
        assert self._choice is not None
        events = list(map(_encode, self._end(self._choice, usage)))
        self._on_end(snapshot(self._writer.view))
        return events

    def failure(self, error: HttpError) -> bytes:
        event = _encode(self._writer.fail(str(error)))
        self._on_end(snapshot(self._writer.view))
        return event

    def whole(self, choices: list[Choice], usage: Usage) -> Iterator[bytes]:
        (choice,) = choices
        scored = choice.scores.tokens if self._wants_logprobs else []
        steps: list[Iterable[ResponseEvent]] = [self._writer.begin()]
        steps += self._write(choice, "".join(choice.texts), True, chat_logprobs(scored, self._tokenizer).content)
        steps.append(self._end(choice, usage))
        for step in steps:
            for _ in step:
                pass
        body = snapshot(self._writer.view)
        self._on_end(body)
        yield body

    def _write(
        self,
        choice: Choice,
        text: str,
        is_last: bool,
        logprobs: list[TokenLogprob] | None,
        degraded: Degraded | UnsetType = UNSET,
    ) -> Iterator[Iterable[ResponseEvent]]:
        """What the text consists of. Log probabilities stand beside what the client reads."""
        if self._reader is None:
            self._reader = AnswerReader(choice.prompt.reading or Reading(), self._writer.view.id)
        parts = self._reader.push(text, is_last)
        if not parts and choice.prompt.reading is None and (logprobs or degraded is not UNSET):
            parts = [Said("")]
        for part in parts:
            if isinstance(part, Thought):
                yield self._writer.think(part.text)
            elif isinstance(part, Called):
                yield self._writer.call(self._reader.call_id(self._num_called), part.name)
                self._num_called += 1
            elif isinstance(part, Argued):
                yield self._writer.argue(part.text)
            else:
                yield self._writer.say(part.text, logprobs, degraded)
                logprobs = None

    def _end(self, choice: Choice, usage: Usage) -> Iterator[ResponseEvent]:
        details = usage.prompt_tokens_details
        spent = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=ResponseInputDetails(cached_tokens=details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=ResponseOutputDetails(),
            total_tokens=usage.total_tokens,
            masked_tokens=usage.masked_tokens,
        )
        masked = Degraded(masked_ranges=choice.masked_ranges) if choice.masked_ranges else UNSET
        return self._writer.end(choice.finish_reason != "length", spent, int(time.time()), masked)


def _encode(event: ResponseEvent) -> bytes:
    return sse.named_event(event.type, event)
