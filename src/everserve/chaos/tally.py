"""What is counted while clients run."""

import time
from array import array
from collections import Counter
from dataclasses import dataclass, field

from everserve.chaos.continuations import Continuation, can_ask, continuations
from everserve.chaos.talk import Talk
from everserve.client import percentile

_NUM_LONGEST = 10
_MAX_CONTINUATIONS = 200


@dataclass(frozen=True, order=True)
class Stall:
    """A pause that a client saw."""

    seconds: float
    ended_s: float  # since the storm began
    where: str


@dataclass
class Tally:
    """Counts of all clients together."""

    began_s: float = field(default_factory=time.perf_counter)
    manners: Counter[str] = field(default_factory=Counter)  # requests that came to their end, by how they were asked
    num_tokens: int = 0  # compared
    num_masked: int = 0  # tokens of these that were marked as not exact, and could be any
    num_resumes: int = 0  # connections that took a stream up again
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    firsts_s: "array[float]" = field(default_factory=lambda: array("d"))
    longest: list[Stall] = field(default_factory=list)
    continuations: list[Continuation] = field(default_factory=list)  # after a mask, to be compared
    num_unasked: int = 0  # continuations that cannot be asked for, or are too many

    @property
    def num_streams(self) -> int:
        return self.manners.total()

    def add(self, manner: str, talk: Talk, where: str) -> None:
        self.manners[manner] += 1
        self.num_tokens += talk.answer.num_tokens
        self.num_masked += sum(choice.num_masked for choice in talk.answer.choices)
        self.num_resumes += talk.num_resumes
        self.gaps_s.extend(talk.gaps_s)
        if talk.first_s is not None:
            self.firsts_s.append(talk.first_s)
        for continuation in continuations(talk.request, talk.answer, where):
            if can_ask(talk.request) and len(self.continuations) < _MAX_CONTINUATIONS:
                self.continuations.append(continuation)
            else:
                self.num_unasked += 1
        if talk.gaps_s:
            gap_s, ended_s = talk.longest
            stalls = [*self.longest, Stall(round(gap_s, 3), round(ended_s - self.began_s, 2), where)]
            self.longest = sorted(stalls, reverse=True)[:_NUM_LONGEST]


def spread_ms(values: "array[float]") -> dict[str, float]:
    """p50, p99 and the largest, in milliseconds."""
    ordered = sorted(values)
    figures = {"p50": percentile(ordered, 0.5), "p99": percentile(ordered, 0.99), "max": max(ordered, default=0.0)}
    return {name: round(1e3 * value, 1) for name, value in figures.items()} if ordered else dict.fromkeys(figures, 0.0)
