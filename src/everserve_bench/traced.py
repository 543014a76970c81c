"""Tokens per second over a trace, measured, and what other ways to serve it would give: numbers in, numbers out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everserve.plan.shards import largest_power_of_two
from everserve_bench.availability import Point
from everserve_bench.restarted import Restarted


@dataclass(frozen=True)
class Node:
    """One node's history, served."""

    points: list[Point]  # as it was served
    num_down_s: float  # in which the trace has fewer devices than can serve; the server kept that many
    tokens_per_s: list[float]  # in bins of time
    num_changes: int
    largest_gap_ms: float
    num_streams: int
    num_tokens: int
    num_wrong: int
    errors: list[str]


@dataclass(frozen=True)
class Ways:
    """Tokens per second in bins of time, of one node or of several together."""

    measured: list[float]  # without what the server gave while the trace had too few devices
    fault_free: list[float]  # as measured before the first loss
    fault_scaled: list[float]  # that, times the share of devices that are there
    powers_of_two: list[float]  # derived: as new servers with so many devices give it, and changes cost nothing
    restarts: list[float]  # derived: nothing while a new server starts at each change, then what it gives


def ways(
    points: Sequence[Point],
    measured: Sequence[float],
    fault_free: float,
    num_devices: int,
    fewest: int,
    degrees: Mapping[int, Restarted],
    width_s: float,
) -> Ways:
    """What each way gives on one node. While it has fewer than the `fewest` devices that can serve, no way gives
    anything; one that was not measured gives nothing either.
    """
    ends = [*(point.at_s for point in points[1:]), width_s * len(measured)]
    scaled, powers, restarts, up = ([0.0] * len(measured) for _ in range(4))
    for i, (point, end_s) in enumerate(zip(points, ends, strict=True)):
        num = len(point.devices)
        if num < fewest:
            continue
        _add(up, point.at_s, end_s, 1.0, width_s)
        power = largest_power_of_two(num) if num else 0
        _add(scaled, point.at_s, end_s, fault_free * num / num_devices, width_s)
        _add(powers, point.at_s, end_s, degrees[power].tokens_per_s if power in degrees else 0.0, width_s)
        if num in degrees:
            up_s = point.at_s + (degrees[num].restart_s if i else 0.0)
            _add(restarts, min(up_s, end_s), end_s, degrees[num].tokens_per_s, width_s)
    counted = [rate * share for rate, share in zip(measured, up, strict=True)]
    return Ways(counted, [fault_free] * len(measured), scaled, powers, restarts)


def _add(bins: list[float], begin_s: float, end_s: float, rate: float, width_s: float) -> None:
    for index in range(len(bins)):
        common = min(end_s, (index + 1) * width_s) - max(begin_s, index * width_s)
        bins[index] += rate * max(common, 0.0) / width_s


def together(nodes: Sequence[Ways]) -> Ways:
    """The ways of all nodes at once."""

    def summed(name: str) -> list[float]:
        return [round(sum(values), 1) for values in zip(*(getattr(node, name) for node in nodes), strict=True)]

    return Ways(*(summed(name) for name in ("measured", "fault_free", "fault_scaled", "powers_of_two", "restarts")))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
