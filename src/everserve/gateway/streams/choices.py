"""One choice of a client's request: tokens in, text out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import msgspec

from everserve.errors import EverserveError
from everserve.gateway.http.requests import GenerationRequest
from everserve.gateway.http.responses import FinishReason
from everserve.gateway.streams.fleet import Fleet
from everserve.gateway.streams.stream import Stream
from everserve.gateway.text.detokenizer import ByteLevelDetokenizer
from everserve.gateway.text.logprobs import Scored
from everserve.gateway.text.prompts import Prompt
from everserve.gateway.text.stops import StopMatcher, StopStrings
from everserve.gateway.text.tokenizer import ModelTokenizer
from everserve.tables.outputs import Output, TokenLogprobs
from everserve.tables.requests import RequestSpec


class ChoiceOwner(Protocol):
    """The request that this choice is part of."""

    def note(self, choice: "Choice", output: Output) -> None:
        """Notes an output; to be written down before anything is made of it."""
        ...

    def on_text(self, choice: "Choice", text: str, output: Output) -> None: ...

    def on_failure(self, error: EverserveError) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How a request wants its tokens turned into text; shared by its choices."""

    skip_special_tokens: bool
    stops: StopStrings | None
    stop_token_ids: frozenset[int]
    include_stop: bool

    @classmethod
    def of(cls, request: GenerationRequest) -> "TextOptions":
        stops = [request.stop] if isinstance(request.stop, str) else request.stop
        return cls(
            skip_special_tokens=request.skip_special_tokens is not False,
            stops=StopStrings(stops) if stops else None,
            stop_token_ids=frozenset(request.stop_token_ids or ()),
            include_stop=bool(request.include_stop_str_in_output),
        )


class Scores:
    """Log probabilities: of the prompt, where it is echoed, and of tokens with their places in the choice's text."""

    def __init__(self, prompt: list[TokenLogprobs | None] | None = None) -> None:
        self.prompt = prompt
        self.tokens: list[Scored] = []
        self.offsets: list[int] = []  # of each token

    def add(self, token: int, scores: TokenLogprobs | None, offset: int) -> None:
        self.tokens.append((token, scores))
        self.offsets.append(offset)

    @property
    def mean(self) -> float:
        """Log probability of a token."""
        known = [scores.logprob for _, scores in self.tokens if scores is not None]
        return sum(known) / len(known) if known else 0.0


def best_choices(choices: Sequence["Choice"], num_each: int, num_wanted: int) -> list["Choice"]:
    """The best choices of each prompt, which has `num_each`: those with the highest mean log probability of a
    token; among equals the first."""
    if num_each == num_wanted:
        return list(choices)
    best: list[Choice] = []
    for start in range(0, len(choices), num_each):
        ranked = sorted(choices[start : start + num_each], key=lambda choice: -choice.scores.mean)
        best += ranked[:num_wanted]
    return best


class Choice:
    """Listens to one stream, makes text of its tokens, and ends at a stop string."""

    def __init__(
        self,
        *,
        index: int,
        spec: RequestSpec,
        prompt: Prompt,
        fleet: Fleet,
        owner: ChoiceOwner,
        tokenizer: ModelTokenizer,
        options: TextOptions,
        arrived_s: float,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = 0
        self.num_cached = 0
        self.masked_ranges: list[tuple[int, int]] = []  # of tokens that were sampled under a mask: first, end
        self.stream = Stream(spec, self)
        self.texts: list[str] = []  # these two are filled only where the whole answer is needed at the end
        self.scores = Scores()
        self.offset = 0  # where the text of the latest token begins
        self._num_characters = 0  # of all tokens so far, as far as they are whole characters
        self._fleet = fleet
        self._owner = owner
        self._options = options
        shown = prompt.reading.marks if prompt.reading is not None else frozenset()
        self._detokenizer = tokenizer.detokenizer(options.skip_special_tokens, shown)
        self._stops = StopMatcher(options.stops, options.include_stop) if options.stops else None
        self._arrived_s = arrived_s
        self._first_s = self.last_s = arrived_s  # of the first token, and of the last so far
        self._queued_s = 0.0  # before it was first scheduled
        self._away_since_s: float | None = None  # while it is suspended
        self.has_ended = False

    @property
    def spec(self) -> RequestSpec:
        return self.stream.spec

    @property
    def token_ids(self) -> list[int]:
        return self.stream.tokens

    def cancel(self) -> None:
        """The client has gone. Nothing happens if the choice has ended."""
        if not self.has_ended:
            self._end("abort")
            self._fleet.cancel(self.stream)

    @property
    def bare_detokenizer(self) -> ByteLevelDetokenizer | None:
        """The detokenizer, if it makes all of the text; None: there is more to it."""
        text = self._detokenizer
        return text if self._stops is None and isinstance(text, ByteLevelDetokenizer) else None

    @property
    def is_under_way(self) -> bool:
        """A worker computes it, and has said something already."""
        stream = self.stream
        link = stream.link
        if link is None or stream.home != link.log or stream.prefill_cost or self.has_ended:
            return False
        return self.num_tokens == len(stream.tokens) > 0 and self.last_s == stream.last_s

    def went_on(self, num_tokens: int, num_characters: int) -> None:
        """So much of it was written elsewhere (plain.py)."""
        self.num_tokens += num_tokens
        self._num_characters += num_characters
        if num_tokens and self.stream.last_s is not None:
            self.last_s = self.stream.last_s

    def suspend(self) -> None:
        """The client has gone, and may come back."""
        if not self.has_ended:
            self._away_since_s = self._fleet.clock()
            self._fleet.suspend(self.stream)

    def resume(self, id: str) -> Stream:
        """The client is back. Its stream gets a new name: its last worker may not have heard yet that it was suspended,
        and what it still says must not be taken for what the next one says."""
        self.stream.spec = msgspec.structs.replace(self.spec, id=id)
        now_s = self._fleet.clock()
        if self._away_since_s is not None:  # latencies are about this server, not about how long a client was away
            self._arrived_s += now_s - self._away_since_s
            self._first_s += now_s - self._away_since_s
            self._away_since_s = None
        self.last_s = now_s
        return self.stream

    def on_output(self, output: Output, now_s: float) -> None:
        """One token, exactly once and in order."""
        self._owner.note(self, output)
        self._measure(output, now_s)
        text = self._advance(output)
        if self.finish_reason is not None:
            if output.finish_reason is None:  # a stop string
                self._fleet.cancel(self.stream)
            self._end(self.finish_reason)
        self._owner.on_text(self, text, output)

    def replay(self, output: Output) -> str:
        """One token that an earlier gateway had. Its text, as it was."""
        if output.token is not None:
            self.stream.tokens.append(output.token)
        self.stream.masked = output.masked
        text = self._advance(output)
        self.has_ended = self.finish_reason is not None
        return text

    def _advance(self, output: Output) -> str:
        """Text, and whether it ends here: a function of the outputs so far."""
        is_last = output.finish_reason is not None
        if output.index == 0:
            self.num_cached = output.num_cached
        if output.masked is not None:
            self._note_masked(output.index)
        if output.token is not None:
            self.num_tokens += 1
        self.offset = self._num_characters
        text = self._text_of(output)
        self._num_characters += len(text)
        if is_last:
            text += self._detokenizer.flush()
            self.finish_reason = cast(FinishReason, output.finish_reason)
            if output.stop_id in self._options.stop_token_ids:
                self.stop_reason = output.stop_id  # stays None at the model's own end of sequence
        if self._stops is not None:
            text = self._stops.push(text, armed=self.num_tokens > self.spec.params.min_tokens)
            if self._stops.hit is not None:
                self.finish_reason, self.stop_reason = "stop", self._stops.hit
            elif is_last:
                text += self._stops.flush()
        return text

    def on_failure(self, error: EverserveError) -> None:
        """The stream broke."""
        self._end("error")
        self._owner.on_failure(error)

    def _text_of(self, output: Output) -> str:
        if output.token is None or (output.stop_id is not None and not self._options.include_stop):
            return ""
        return self._detokenizer.push(output.token)

    def _measure(self, output: Output, now_s: float) -> None:
        metrics = self.stream.metrics
        if output.index == 0:
            self._first_s = now_s
            metrics.time_to_first_token_s.observe(now_s - self._arrived_s)
            self._queued_s = self.stream.waited_s + output.queued_s
            metrics.queue_s.observe(self._queued_s)
            metrics.num_prompt_tokens += len(self.spec.prompt)
            metrics.num_cached_tokens += output.num_cached
        elif now_s > self.last_s:  # tokens that come together end one such time
            metrics.inter_token_latency_s.observe(now_s - self.last_s)
        self.last_s = now_s
        if output.token is not None:
            metrics.num_generation_tokens += 1

    def _note_masked(self, index: int) -> None:
        ranges = self.masked_ranges
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))

    def _end(self, reason: str) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        metrics = self.stream.metrics
        metrics.num_finished[reason] += 1
        if reason in ("stop", "length"):
            metrics.latency_s.observe(self.last_s - self._arrived_s)
            metrics.prefill_s.observe(max(0.0, self._first_s - self._arrived_s - self._queued_s))
            metrics.decode_s.observe(self.last_s - self._first_s)
            metrics.inference_s.observe(max(0.0, self.last_s - self._arrived_s - self._queued_s))
            metrics.prompt_tokens.observe(len(self.spec.prompt))
            metrics.computed_tokens.observe(len(self.spec.prompt) - self.num_cached)
            metrics.max_tokens.observe(self.spec.params.max_tokens)
            metrics.generation_tokens.observe(self.num_tokens)
            if self.num_tokens > 1:
                metrics.mean_token_s.observe((self.last_s - self._first_s) / (self.num_tokens - 1))
