"""What arrival times say: gaps around a kill, rates over time, ratios between variants. Numbers in, numbers out.

All times are seconds of the machine's monotonic clock, which arrivals and events share.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Verdict:
    """One stream beside the same stream undisturbed."""

    num_tokens: int
    num_lost: int  # expected, and never arrived
    num_different: int  # not the expected token in its place, or one too many

    @property
    def is_exact(self) -> bool:
        return not self.num_lost and not self.num_different


def compare(token_ids: Sequence[int], expected: Sequence[int]) -> Verdict:
    """Token by token, in order."""
    differ = sum(a != b for a, b in zip(token_ids, expected, strict=False))
    surplus = max(len(token_ids) - len(expected), 0)
    return Verdict(len(token_ids), max(len(expected) - len(token_ids), 0), differ + surplus)


def first_difference(token_ids: Sequence[int], expected: Sequence[int]) -> int | None:
    """The index of the first token that is another one; None if only their number differs."""
    pairs = enumerate(zip(token_ids, expected, strict=False))
    return next((index for index, (token, right) in pairs if token != right), None)


# -- gaps ----------------------------------------------------------------------------------------


def largest_gap(arrivals_s: Sequence[float], at_s: float, within_s: float) -> float | None:
    """The longest time between two tokens that spans `at_s`, or begins at most `within_s` after it.

        ... a   b  at_s  c    d  ...  at_s + within_s  ...      pairs that count: (b, c), (c, d), ...

    None if there is no such pair: the stream ended before, or began later.
    """
    gaps = [b - a for a, b in pairwise(arrivals_s) if b > at_s and a <= at_s + within_s]
    return max(gaps, default=None)


def gaps_between(arrivals_s: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    """Inter-token times of which both ends lie in the interval."""
    return [b - a for a, b in pairwise(arrivals_s) if a >= begin_s and b <= end_s]


def with_replay(before_s: Sequence[float], replay_s: Sequence[float]) -> list[float]:
    """When each token was new to a client whose stream broke and was asked for again from the prompt.

    The replay's first tokens are those that the client has already; they are no news.
    """
    return [*before_s, *replay_s[len(before_s) :]]


# -- over time -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Figures in bins of equal width; the first begins `begin_s` after the origin (before it, if negative)."""

    begin_s: float
    width_s: float
    tokens_per_s: list[float]
    largest_gap_ms: list[float]  # of the inter-token times that ended in this bin; 0 if none did


def series(streams: Iterable[Sequence[float]], origin_s: float, begin_s: float, end_s: float, width_s: float) -> Series:
    """Tokens per second and the largest inter-token time over time, of all streams together."""
    num_bins = max(math.ceil((end_s - begin_s) / width_s - 1e-9), 0)
    counts, gaps = [0] * num_bins, [0.0] * num_bins
    for arrivals_s in streams:
        previous: float | None = None
        for arrival in arrivals_s:
            bin_ = math.floor((arrival - origin_s - begin_s) / width_s)
            if 0 <= bin_ < num_bins:
                counts[bin_] += 1
                if previous is not None:
                    gaps[bin_] = max(gaps[bin_], arrival - previous)
            previous = arrival
    return Series(begin_s, width_s, [round(n / width_s, 1) for n in counts], [round(1e3 * gap, 2) for gap in gaps])


def rate(streams: Iterable[Sequence[float]], begin_s: float, end_s: float) -> float:
    """Tokens per second in the interval, of all streams together."""
    return sum(begin_s < arrival <= end_s for arrivals in streams for arrival in arrivals) / (end_s - begin_s)


@dataclass(frozen=True)
class Steady:
    """The stretch in which all streams decode: no prompt is computed, and none has finished."""

    tokens_per_s: float
    gaps_s: list[float]


def steady(streams: Sequence[Sequence[float]]) -> Steady:
    """From the last stream's first token to the first stream's last token."""
    begin_s = max(arrivals[0] for arrivals in streams)
    end_s = min(arrivals[-1] for arrivals in streams)
    num_tokens = sum(begin_s < arrival <= end_s for arrivals in streams for arrival in arrivals)
    if num_tokens == 0:
        raise ValueError("the streams never ran all together: they are too short")
    gaps = [gap for arrivals in streams for gap in gaps_between(arrivals, begin_s, end_s)]
    return Steady(num_tokens / (end_s - begin_s), gaps)


# -- over rounds ---------------------------------------------------------------------------------


def ratios(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Round by round: both were measured within the same seconds, so that slow seconds cancel out."""
    return [value / base for value, base in zip(values, reference, strict=True)]


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Where the true median lies, from the order of the values alone; their whole range if there are too few to say.

    The k smallest and k largest are left out; each side holds the true median beyond it with the probability of at
    most k heads in n tosses.
    """
    ordered = sorted(values)
    n, k, tail = len(ordered), 0, 0.0
    while k < n // 2:
        tail += math.comb(n, k) / 2**n
        if 2 * tail > 1 - confidence:
            break
        k += 1
    k = max(k - 1, 0)
    return ordered[k], ordered[n - 1 - k]


def median_index(values: Sequence[float]) -> int:
    """Which of them is the median (the lower one of two): the round to show."""
    return sorted(range(len(values)), key=lambda i: values[i])[(len(values) - 1) // 2]
