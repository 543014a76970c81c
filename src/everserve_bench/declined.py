"""What arrival times say about an instance whose number of devices changes: numbers in, numbers out."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from everserve.client import percentile
from everserve_bench import analysis

_WITHIN_S = 1.0  # a change counts for at least so long
_BIN_S = 0.25
_PEAK = 0.95  # of what tokens/s stay at


@dataclass(frozen=True)
class Stage:
    """One change, and the time after it."""

    devices_before: int
    devices: int
    took_s: float  # until everything was where it should be
    pauses_ms: list[float]  # of each stream, the longest time between two tokens around the change
    pause_ms: float  # of the median stream
    worst_ms: float
    peak_s: float  # from the change, until tokens/s are what they stay at
    tokens_per_s: float  # what they stay at: in the second half of the stage
    lost_s: float  # of work: how much longer the stage took than its tokens would at that rate


def judge(
    sizes: Sequence[int],
    streams: Sequence[Sequence[float]],
    begin_s: float,
    marks: Sequence[tuple[float, float]],
    end_s: float,
) -> list[Stage]:
    """`marks`: of each change when it was asked for, and when all was settled."""
    ends = [*(asked_s for asked_s, _ in marks[1:]), end_s]
    stages = []
    for (before, after), (asked_s, settled_s), until_s in zip(itertools.pairwise(sizes), marks, ends, strict=True):
        within_s = max(settled_s - asked_s, _WITHIN_S)
        gaps = [analysis.largest_gap(arrivals, asked_s, within_s) for arrivals in streams]
        pauses = sorted(1e3 * gap for gap in gaps if gap is not None)
        stays = analysis.rate(streams, (settled_s + until_s) / 2, until_s)
        done_s = analysis.rate(streams, asked_s, until_s) * (until_s - asked_s) / stays if stays else 0.0
        stages.append(
            Stage(
                devices_before=before,
                devices=after,
                took_s=round(settled_s - asked_s, 3),
                pauses_ms=[round(pause, 2) for pause in pauses],
                pause_ms=round(percentile(pauses, 0.5), 2) if pauses else 0.0,
                worst_ms=round(max(pauses, default=0.0), 2),
                peak_s=round(time_to_peak(streams, asked_s, until_s, stays), 3),
                tokens_per_s=round(stays, 1),
                lost_s=round(max(until_s - asked_s - done_s, 0.0), 3),
            )
        )
    return stages


def time_to_peak(streams: Sequence[Sequence[float]], at_s: float, until_s: float, stays: float) -> float:
    """How long after the moment tokens/s first are near what they stay at, after they have been lower. 0 if they never
    were; the whole stage if they do not get there."""
    series = analysis.series(streams, at_s, 0.0, until_s - at_s, _BIN_S).tokens_per_s
    whole_bins = series[: int((until_s - at_s) / _BIN_S)]
    low = next((i for i, rate in enumerate(whole_bins) if rate < _PEAK * stays / 2), None)
    if low is None:
        return 0.0
    high = next((i for i, rate in enumerate(whole_bins) if i > low and rate >= _PEAK * stays), len(whole_bins))
    return high * _BIN_S
