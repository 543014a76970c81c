"""One answer beside the expected one: what is missing, what came twice, what differs, and where first.

Tokens that are marked as computed under a mask of experts may be any. What comes before the first of them is compared
with the expected answer as always; what comes after them is another matter (continuations.py). While nothing is
disturbed no token may be marked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from everserve.chaos.answers import Answer, Choice

LOGPROB_TOLERANCE = 1e-4


class Kind(StrEnum):
    """Everything that can be wrong with a stream."""

    GAP = "gap"  # a token or an event is missing
    DUPLICATE = "duplicate"  # one came twice
    DIVERGENCE = "divergence"  # a different one came
    LOGPROBS = "logprobs"  # the right token with other numbers
    ENDING = "ending"  # finish reason, usage or text do not fit the tokens
    ERROR = "error"  # an HTTP error, an error event, a broken connection
    HANG = "hang"  # nothing for too long
    MASKED = "masked"  # marked as computed under a mask, when nothing was disturbed


@dataclass(frozen=True)
class Difference:
    """The first thing that is wrong with a choice."""

    kind: Kind
    choice: int
    index: int  # of the token (or of the event) where it begins
    expected: Any
    got: Any

    def __str__(self) -> str:
        return f"choice {self.choice}, token {self.index}: expected {self.expected!r}, got {self.got!r}"


def compare(answer: Answer, expected: Answer, is_complete: bool = True) -> list[Difference]:
    """At most one difference per choice, and one of the whole. An answer that was cancelled must be a beginning."""
    found = [
        difference
        for i, (choice, right) in enumerate(zip(answer.choices, expected.choices, strict=True))
        if (difference := _compare_choice(i, choice, right, is_complete)) is not None
    ]
    is_masked = any(choice.masked for choice in answer.choices)
    if is_complete and not found and not is_masked and answer.usage != expected.usage:
        found.append(Difference(Kind.ENDING, 0, answer.num_tokens, expected.usage, answer.usage))
    return found


def marks(answer: Answer) -> list[Difference]:
    """The marks in an answer that was not disturbed: the first marked token of each choice."""
    marked = [(i, choice.masked[0]) for i, choice in enumerate(answer.choices) if choice.masked]
    return [Difference(Kind.MASKED, i, first, "no mark", f"marks up to {end}") for i, (first, end) in marked]


def _compare_choice(number: int, choice: Choice, expected: Choice, is_complete: bool) -> Difference | None:
    if choice.masked:
        choice, is_complete = _before_mask(choice), False
    tokens, right = choice.token_ids, expected.token_ids
    at = first_difference(tokens, right)
    if at is not None and not (at == len(tokens) and not is_complete):
        return Difference(classify(tokens, right, at, is_complete), number, at, _window(right, at), _window(tokens, at))
    at = _first_other_logprob(choice, expected)
    if at is not None:
        return Difference(Kind.LOGPROBS, number, at, _scores(expected, at), _scores(choice, at))
    if is_complete and _ending(choice) != _ending(expected):
        return Difference(Kind.ENDING, number, len(tokens), _ending(expected), _ending(choice))
    text, right_text = choice.text, expected.text if is_complete else expected.text[: len(choice.text)]
    if text != right_text:
        at = first_difference(text, right_text) or 0
        return Difference(Kind.ENDING, number, len(tokens), _around(right_text, at), _around(text, at))
    return None


def _before_mask(choice: Choice) -> Choice:
    """The tokens before the first that is marked, and their numbers. Which text is theirs is not known."""
    end = choice.masked[0][0]
    return Choice(choice.token_ids[:end], logprobs=choice.logprobs[:end], top_logprobs=choice.top_logprobs[:end])


def first_difference(tokens: Sequence[object], expected: Sequence[object]) -> int | None:
    """The first index at which they differ; the shorter's length if it is a prefix; None if they are equal."""
    for i, (token, right) in enumerate(zip(tokens, expected, strict=False)):
        if token != right:
            return i
    return None if len(tokens) == len(expected) else min(len(tokens), len(expected))


def classify(tokens: Sequence[int], expected: Sequence[int], at: int, is_complete: bool = True) -> Kind:
    """What kind of mistake explains the difference that begins there.

    expected   a b c d e
    gap        a b d e        what follows is what is expected later
    duplicate  a b b c d e    what is expected follows later, after something that had come before
    otherwise  a b x d e      divergence
    """
    rest, right = list(tokens[at:]), list(expected[at:])

    def is_explained(rest: list[int], right: list[int]) -> bool:
        return rest == right if is_complete else rest == right[: len(rest)]

    if any(is_explained(rest, right[num:]) for num in range(1, len(right) + 1)):
        return Kind.GAP
    for num in range(1, min(len(rest), at) + 1):
        if rest[:num] == list(expected[at - num : at]) and is_explained(rest[num:], right):
            return Kind.DUPLICATE
    return Kind.DIVERGENCE


def _first_other_logprob(choice: Choice, expected: Choice) -> int | None:
    """The first token that arrived with another log probability. Numbers that are missing differ too."""
    if not expected.logprobs:
        return 0 if choice.logprobs else None
    for i in range(len(choice.token_ids)):
        if i >= len(choice.logprobs) or i >= len(expected.logprobs):
            return i
        if not _close(choice.logprobs[i], expected.logprobs[i]):
            return i
        best, right = choice.top_logprobs[i] or {}, expected.top_logprobs[i] or {}
        if best.keys() != right.keys() or not all(_close(best[text], right[text]) for text in right):
            return i
    return None


def _close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= LOGPROB_TOLERANCE


def _scores(choice: Choice, at: int) -> Any:
    return (choice.logprobs[at], choice.top_logprobs[at]) if at < len(choice.logprobs) else None


def _ending(choice: Choice) -> tuple[str | None, int | str | None]:
    return choice.finish_reason, choice.stop_reason


def _window(tokens: Sequence[int], at: int, num: int = 4) -> list[int]:
    """The tokens from a place on: enough to see what happened."""
    return list(tokens[at : at + num])


def _around(text: str, at: int, num: int = 20) -> str:
    return text[max(at - num, 0) : at + num]
