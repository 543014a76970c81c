"""How much of prompts a step computes while other streams decode, from how long such steps took.

Each step is a pause between two tokens of every decoding stream. It may take `slowdown` times as long as one without
prompts, and within that prompts get as much as possible:

    time of a step
      |                       x       x  measured, by size of the prompts in it
      |- - - - - - - - -x- -/- - - -  the limit: slowdown * (a step without prompts)
      |         x  ---      |
      |  x ---              |
      +---------------------+--------  size: tokens, those at the end of long contexts counting more

Between two measured sizes times are on a straight line. Beyond the largest, and before the smallest, the time on top of
a step without prompts is taken for proportional to the size: what is chosen then is measured next. No step is more than
twice as large as the largest that was measured.

With few streams a step reads few experts, and any prompt makes it read all of them: then even the smallest chunk takes
longer than the limit, and small chunks gain nothing. In that case the limit is `slowdown` times the smallest chunk.
"""

from collections.abc import Mapping
from itertools import pairwise

SMALLEST = 64.0  # what is always computed
_ABOUT = 1.1
_GROWTH = 2.0
_MARGIN = 0.95  # of the limit: half of all steps of a size take longer than the median, which is what is measured


def affordable(times: Mapping[float, float], decode_s: float, slowdown: float) -> float:
    """The largest size that a step may have, at least SMALLEST. `times`: seconds of a step by the size of the prompts
    in it; `decode_s`: of one without."""
    points = _rising(times, decode_s)
    if not points:
        return SMALLEST
    limit_s = slowdown * _MARGIN * decode_s
    first, first_s = points[0]
    if first <= _ABOUT * SMALLEST and first_s > limit_s:
        limit_s = slowdown * first_s
    return max(SMALLEST, min(_size_at(points, limit_s, decode_s), _GROWTH * points[-1][0]))


def _rising(times: Mapping[float, float], decode_s: float) -> list[tuple[float, float]]:
    """Times by size. Nothing takes less time than something smaller, but by chance."""
    points: list[tuple[float, float]] = []
    least_s = decode_s
    for size in sorted(times):
        least_s = max(least_s, times[size])
        points.append((size, least_s))
    return points


def _size_at(points: list[tuple[float, float]], limit_s: float, decode_s: float) -> float:
    """The largest size that takes no longer."""
    for (before, before_s), (after, after_s) in pairwise([(0.0, decode_s), *points]):
        if after_s > limit_s:
            return before + (after - before) * max(0.0, limit_s - before_s) / (after_s - before_s)
    last, last_s = points[-1]
    return last * (limit_s - decode_s) / (last_s - decode_s) if last_s > decode_s else _GROWTH * last
