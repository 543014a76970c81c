"""Exact speculation: drafts are computed beside the tokens that are certain, and count if they are what comes anyway.

    tokens     ... a b c                    c is pending; drafts d e f
    rows               c d e f              in one step; each has logits, and the bits that it would have alone
    drawn              d e x y              as always: with the number of its index, after the tokens before it
    count              c d e                e was right, f is not x: the stream goes on with x, y is forgotten

So a stream has the same tokens with drafts and without, however they are chosen. Nothing that outlives a step knows of
them: KV of drafts that were wrong lies behind what counts as computed, and is overwritten; a stream that goes on
elsewhere has its tokens, and gets new drafts there.

Only steps in which all streams decode have drafts. plan/drafts.py says how many; what it needs to know is measured
here: how well a stream's drafts fit (foresight.py), and what rows cost.
"""

from collections import defaultdict, deque
from collections.abc import Sequence as SequenceOf
from math import log2
from typing import Protocol

from everserve.config.engine import EngineConfig
from everserve.engine.limits import EngineLimits
from everserve.engine.ngrams import continuation
from everserve.engine.sequence import Chunk, Sequence
from everserve.plan.drafts import least_chance, shares

_GUESS_EVERY, _GUESSED = 16, 4  # steps between two guesses about a stream; tokens of each
_NUM_ALIKE, _NUM_ENOUGH = 9, 3  # steps without drafts that count; fewer say nothing
_MEASURED_ALL, _MEASURED_EVERY = 8, 8  # steps without drafts in a row: the first are measured, then every eighth
_NUM_DRAFTED = 32  # steps with drafts that are remembered
_GUESSED_ROWS = 16  # weight of the guess
_REST = 4  # steps, when no stream is likely to have drafts that fit
_STEPS_WITH_DRAFTS = 32  # then one without: what that takes must stay known
_KNOWN_FOR = 512  # steps without drafts: then it is forgotten what steps with drafts have taken
_MOST_FIXED_ROWS = 4096.0


class Drafting(Protocol):
    """Where an engine has its drafts from."""

    def drafts(self, sequences: SequenceOf[Sequence]) -> list[tuple[int, ...]]:
        """Drafts for each of these streams, which all decode. Empty: there are none at all."""

    def may_have_drafts(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether the next step of these streams may have drafts: then it must wait for the end of this one."""

    def note(self, given: list[Chunk], counted: list[Chunk], seconds: float) -> None:
        """A step of streams that all decode has ended. Of its chunks, so much counts."""


class RowCosts:
    """What steps take before their first row, measured in rows. `first_guess`: before anything was measured.

    Steps differ from one to the next by more than a row, and steps are held up, never hurried: so what counts is not
    the mean, but what only a third of them undercut. The guess counts as `_GUESSED_ROWS` that were measured. Numbers of
    streams are told apart in classes, since a row of few reads more of the model than a row of many.
    """

    def __init__(self, first_guess: float) -> None:
        self._first_guess = first_guess
        self._plain: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_ALIKE))
        self._drafted: dict[int, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=_NUM_DRAFTED))
        self._num_drafted = self._num_plain = 0  # in a row
        self._found: dict[int, float | None] = {}  # since the last measurement, by number of streams

    def note(self, num_streams: int, num_drafts: int, seconds: float) -> None:
        """A step has ended."""
        if not num_drafts:
            self._num_drafted, self._num_plain = 0, self._num_plain + 1
            if self._num_plain > _MEASURED_ALL and self._num_plain % _MEASURED_EVERY:
                return  # there are many of them, and looking at them takes time too
            self._found.clear()
            self._plain[_class_of(num_streams)].append(seconds)
            if self._num_plain >= _KNOWN_FOR:
                self._drafted.clear()
            return
        self._found.clear()
        kind = _class_of(num_streams)
        if len(self._plain[kind]) >= _NUM_ENOUGH:
            self._drafted[kind].append(((seconds - self._plain_s(kind)) / num_drafts, num_drafts))
            self._num_drafted, self._num_plain = self._num_drafted + 1, 0

    def fixed_rows(self, num_streams: int) -> float | None:
        """None: steps without drafts must be measured first."""
        if num_streams not in self._found:
            self._found[num_streams] = self._fixed_rows(num_streams)
        return self._found[num_streams]

    def _fixed_rows(self, num_streams: int) -> float | None:
        kind = _class_of(num_streams)
        plain = self._plain.get(kind, ())
        if len(plain) < _NUM_ENOUGH or self._num_drafted >= _STEPS_WITH_DRAFTS:
            return None
        plain_s = self._plain_s(kind)
        guess = plain_s / (self._first_guess + num_streams), _GUESSED_ROWS
        row_s = _typical([*self._drafted.get(kind, ()), guess])
        fixed_rows = plain_s / row_s - num_streams if row_s > 0 else _MOST_FIXED_ROWS
        return min(max(fixed_rows, 0.0), _MOST_FIXED_ROWS)

    def _plain_s(self, kind: int) -> float:
        return _typical([(seconds, 1) for seconds in self._plain[kind]])


def _typical(weighted: list[tuple[float, int]]) -> float:
    """The value that has a third of the weight below it."""
    third, weight = sum([num for _, num in weighted]) / 3, 0
    for value, num in sorted(weighted):
        weight += num
        if weight > third:
            return value
    raise AssertionError("there are no values")


def _class_of(num_streams: int) -> int:
    return round(2 * log2(num_streams))


class Speculator:
    """`Drafting` by n-grams."""

    def __init__(self, config: EngineConfig, limits: EngineLimits, free_rows: float) -> None:
        """`free_rows`: the first guess of RowCosts."""
        told = config.speculation
        self._most, self._shortest, self._longest = (
            told.num_speculative_tokens,
            told.prompt_lookup_min,
            told.prompt_lookup_max,
        )
        self._most_rows = min(config.max_num_batched_tokens, limits.max_logits_rows)
        self._most_tokens = limits.max_model_len
        self._costs = RowCosts(free_rows)
        self._rest = 0  # steps before drafts are looked for again
        self._num_steps = 0

    @classmethod
    def of(cls, config: EngineConfig, limits: EngineLimits, free_rows: float) -> "Speculator | None":
        """None: no drafts are wanted."""
        return cls(config, limits, free_rows) if config.speculation.num_speculative_tokens else None

    def drafts(self, sequences: SequenceOf[Sequence]) -> list[tuple[int, ...]]:
        self._rest -= self._rest > 0
        fixed_rows = self._costs.fixed_rows(len(sequences)) if not self._rest else None
        if fixed_rows is None:
            return []
        least, chances = least_chance(len(sequences), fixed_rows), [s.foresight.chance for s in sequences]
        if max(chances) <= least:
            self._rest = _REST
            return []
        found = [self._search(s) if chance > least else () for s, chance in zip(sequences, chances, strict=True)]
        if not any(found):
            return []
        nums = shares(chances, list(map(len, found)), fixed_rows, self._most_rows - len(sequences))
        return [tokens[:num] for tokens, num in zip(found, nums, strict=True)] if any(nums) else []

    def may_have_drafts(self, sequences: SequenceOf[Sequence]) -> bool:
        fixed_rows = self._costs.fixed_rows(len(sequences))
        if fixed_rows is None:
            return False
        least = least_chance(len(sequences), fixed_rows)
        return any([sequence.foresight.chance > least for sequence in sequences])  # noqa: C419 (a list is quicker)

    def note(self, given: list[Chunk], counted: list[Chunk], seconds: float) -> None:
        num_drafts = sum([chunk[1] for chunk in given]) - len(given) if given is not counted else 0
        self._costs.note(len(given), num_drafts, seconds)
        if num_drafts:
            for chunk, counts in zip(given, counted, strict=True):
                if chunk.drafts:
                    chunk.sequence.foresight.learn(counts.num_tokens - 1, len(chunk.drafts))
        self._num_steps += 1
        for chunk in given[self._num_steps % _GUESS_EVERY :: _GUESS_EVERY]:
            self._guess(chunk.sequence)

    def _guess(self, sequence: Sequence) -> None:
        sequence.foresight.look_back(sequence.tokens)
        drafts = continuation(sequence.tokens, _GUESSED, self._shortest, self._longest)
        sequence.foresight.guess(drafts, len(sequence.tokens))

    def _search(self, sequence: Sequence) -> tuple[int, ...]:
        """Search for as many as could be of use: the last token needs no row."""
        num_left = min(sequence.num_most, self._most_tokens) - len(sequence.tokens) - 1
        foresight, num = sequence.foresight, min(self._most, num_left)
        if num <= 0 or not foresight.should_search():
            return ()
        found = continuation(sequence.tokens, num, self._shortest, self._longest)
        foresight.note_search(bool(found))
        return found
