"""A trace of how many of 64 spot instances were running, as losses and returns of the devices of nodes.

The trace (data/README.md) says how many, not which: those that end and those that begin are drawn from a seed. Nodes
have consecutive instances as their devices. Time is compressed by one factor; changes that then fall into the same
moment are one change.
"""

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_FILE = Path(__file__).parent / "data" / "gcp_a100.csv"
NUM_INSTANCES = 64
_MOMENT_S = 0.25  # of compressed time


@dataclass(frozen=True)
class Point:
    """From this time on, these devices of a node are there."""

    at_s: float
    devices: frozenset[int]


def read() -> list[tuple[float, int]]:
    """(seconds since the beginning, instances that were running)."""
    with _FILE.open(encoding="ascii", newline="") as lines:
        return [(float(row["t_s"]), int(row["instances"])) for row in csv.DictReader(lines)]


def nodes(trace: Sequence[tuple[float, int]], per_node: int, seed: int) -> list[list[Point]]:
    """The same history for each node, with so many devices; uncompressed, with changes of the node only."""
    found: list[list[Point]] = [[] for _ in range(NUM_INSTANCES // per_node)]
    for at_s, running in _histories(trace, seed):
        for node, points in enumerate(found):
            own = range(node * per_node, (node + 1) * per_node)
            devices = frozenset(instance - own.start for instance in running if instance in own)
            if not points or points[-1].devices != devices:
                points.append(Point(at_s, devices))
    return found


def _histories(trace: Sequence[tuple[float, int]], seed: int) -> Iterator[tuple[float, frozenset[int]]]:
    """Which instances are running: as few as possible change."""
    dice = random.Random(f"availability {seed}")
    running: set[int] = set()
    for at_s, number in trace:
        others = sorted(set(range(NUM_INSTANCES)) - running)
        if number > len(running):
            running |= set(dice.sample(others, number - len(running)))
        else:
            running -= set(dice.sample(sorted(running), len(running) - number))
        yield at_s, frozenset(running)


def compress(points: Sequence[Point], whole_s: float, seconds: float, per_node: int) -> list[Point]:
    """A history of `whole_s` in `seconds`; it begins and ends with all devices."""
    found = [Point(0.0, frozenset(range(per_node)))]
    for point in points:
        at_s = point.at_s * seconds / whole_s
        if len(found) > 1 and at_s - found[-1].at_s < _MOMENT_S:
            at_s = found.pop().at_s
        found.append(Point(max(at_s, _MOMENT_S), point.devices))
    changes = [point for before, point in pairwise(found) if point.devices != before.devices]
    return [found[0], *changes]


def held_up(points: Sequence[Point], fewest: int) -> list[Point]:
    """With at least so many devices: where there are fewer, the lowest of those that are missing stay."""
    found = []
    for point in points:
        missing = sorted(set(range(max(fewest, max(point.devices, default=0) + 1))) - point.devices)
        kept = point.devices.union(missing[: max(fewest - len(point.devices), 0)])
        found.append(Point(point.at_s, kept))
    return found


def numbers(points: Sequence[Point], seconds: float, width_s: float) -> list[float]:
    """How many devices are there in each bin of time, on average."""
    ends = [*(point.at_s for point in points[1:]), seconds]
    found = [0.0] * round(seconds / width_s)
    for point, end_s in zip(points, ends, strict=True):
        for index in range(len(found)):
            common = min(end_s, (index + 1) * width_s) - max(point.at_s, index * width_s)
            found[index] += len(point.devices) * max(common, 0.0) / width_s
    return found
