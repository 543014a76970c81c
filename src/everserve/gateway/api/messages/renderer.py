"""Writes what a generation says as one message (api/generation.py: Renderer)."""

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import UNSET, UnsetType

from everserve.gateway.api.messages.view import MessageEvent, MessageUsage, MessageView, StopReason
from everserve.gateway.api.messages.writer import Writer
from everserve.gateway.http import responses, sse
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.responses import Degraded
from everserve.gateway.streams.choices import Choice
from everserve.gateway.streams.plain import Around
from everserve.gateway.text.reading.answers import AnswerReader, Reading
from everserve.gateway.text.reading.parts import Argued, Called, Thought
from everserve.tables.outputs import Output


class MessagesRenderer:
    """Renders one message, which has one choice. `is_cut`: the context has less room than the client asked for."""

    remembers = True

    def __init__(self, id: str, model: str, is_cut: bool) -> None:
        self._writer = Writer(MessageView(id=id, model=model, usage=_usage(0, 0, 0)))
        self._is_cut = is_cut
        self._choice: Choice | None = None
        self._reader: AnswerReader | None = None
        self._num_called = 0

    def events(
        self, choice: Choice, text: str, output: Output, usage: responses.Usage | None
    ) -> list[sse.Event]:  # fmt: skip
        self._choice = choice
        begun = _usage(len(choice.prompt.ids), choice.num_cached, 0)
        events: list[sse.Event] = list(map(_encode, self._writer.begin(begun)))
        degraded: Degraded | UnsetType = UNSET
        if output.masked is not None:
            degraded = Degraded(masked_ranges=[(output.index, output.index + 1)])
        for step in self._write(choice, text, choice.finish_reason is not None, degraded):
            events += map(_encode, step)
        return events

    def around(self, choice: Choice) -> Around | None:
        """Each event depends on what was written before."""
        return None

    def ending(self, usage: responses.Usage) -> list[bytes]:
        assert self._choice is not None
        return list(map(_encode, self._end(self._choice, usage)))

    def failure(self, error: HttpError) -> bytes:
        return sse.named_event("error", error.message_error())

    def whole(self, choices: list[Choice], usage: responses.Usage) -> Iterator[bytes]:
        (choice,) = choices
        for step in (*self._write(choice, "".join(choice.texts), True), self._end(choice, usage)):
            for _ in step:
                pass
        view = self._writer.view
        if choice.masked_ranges:
            view.degraded = Degraded(masked_ranges=choice.masked_ranges)
        yield msgspec.json.encode(view)

    def _write(
        self, choice: Choice, text: str, is_last: bool, degraded: Degraded | UnsetType = UNSET
    ) -> Iterator[Iterable[MessageEvent]]:
        """What the text consists of."""
        if self._reader is None:
            self._reader = AnswerReader(choice.prompt.reading or Reading(), self._writer.view.id)
        parts = self._reader.push(text, is_last)
        if not parts and degraded is not UNSET:
            yield self._writer.say("", degraded)
        for part in parts:
            if isinstance(part, Thought):
                yield self._writer.think(part.text)
            elif isinstance(part, Called):
                yield self._writer.call(self._reader.call_id(self._num_called), part.name)
                self._num_called += 1
            elif isinstance(part, Argued):
                yield self._writer.argue(part.text)
            else:
                yield self._writer.say(part.text, degraded)

    def _end(self, choice: Choice, usage: responses.Usage) -> Iterator[MessageEvent]:
        num_cached = usage.prompt_tokens_details.cached_tokens
        spent = _usage(usage.prompt_tokens, num_cached, usage.completion_tokens, usage.masked_tokens)
        sequence = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        return self._writer.end(self._reason(choice, sequence), sequence, spent)

    def _reason(self, choice: Choice, sequence: str | None) -> StopReason:
        if choice.finish_reason == "length":
            return "model_context_window_exceeded" if self._is_cut else "max_tokens"
        if sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._num_called else "end_turn"


def _usage(num_prompt: int, num_cached: int, num_output: int, num_masked: int | UnsetType = UNSET) -> MessageUsage:
    return MessageUsage(
        input_tokens=num_prompt - num_cached,
        cache_read_input_tokens=num_cached,
        output_tokens=num_output,
        masked_tokens=num_masked,
    )


def _encode(event: MessageEvent) -> bytes:
    return sse.named_event(event.type, event)
