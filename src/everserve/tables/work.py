"""Work that was done in some time, counted so that workers with different work can be compared."""

import math

import msgspec


class Work(msgspec.Struct, frozen=True, array_like=True):
    """`seconds` in which so many units were done. Several kinds of units, because no single one is what takes the time:
    a step has a fixed cost, a cost for each row, and one for each key that a row attends to."""

    seconds: float
    units: tuple[float, ...]


def slowdown(work: Work, other: Work) -> float:
    """How many times as long `work` took as it would have taken at the pace of `other`: at least.

    It is the smallest ratio over all kinds of units. Suppose that each unit has a cost, whatever these costs are: then
    a worker that is as fast as the other one has a ratio of at most 1, also if it had more of everything, or less: its
    time over the other's is at most the largest ratio of its units over the other's.
    """
    pairs = [(mine, its) for mine, its in zip(work.units, other.units, strict=True) if mine > 0 and its > 0]
    return min(((work.seconds / mine) / (other.seconds / its) for mine, its in pairs), default=0.0)


def slowdown_at_most(work: Work, other: Work) -> float:
    """The largest ratio, which in the same way is a bound from above; infinite if there is nothing to compare. Where
    workers do work of different kinds the bounds are far apart, and say little."""
    pairs = [(mine, its) for mine, its in zip(work.units, other.units, strict=True) if mine > 0 and its > 0]
    return max(((work.seconds / mine) / (other.seconds / its) for mine, its in pairs), default=math.inf)
