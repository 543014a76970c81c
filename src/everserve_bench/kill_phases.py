"""Where the time goes between a kill and the next token of the stream that waited longest.

    expert      noticed by a peer -> rows sent again                                        -> token
    attention   noticed           -> streams given away -> there -> KV copied                -> token
                (the gateway's socket ends)  (by the gateway)  (their new worker has ended its step)

Each phase ends with an event; one that has none takes no time. Times are seconds of the machine's monotonic clock,
which arrivals and events share.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from everserve_bench.incident import AT_ONCE_S

PHASES = ("notice", "give away", "arrive", "copy", "send again", "step")
Events = Sequence[Mapping[str, Any]]


def phases_ms(
    fault: str, events: Events, rank: int, killed_s: float, streams: Sequence[Sequence[float]]
) -> dict[str, float]:
    """`rank`: of the worker that was killed; `streams`: arrivals. Empty if no stream was running."""
    next_s = next_token_s(streams, killed_s)
    if next_s is None:
        return {}
    told = [event for event in events if killed_s <= event["at_s"] <= next_s]
    ends = _of_attention(told, rank) if fault == "attention" else _of_expert(told, rank)
    return _durations({**ends, "step": next_s}, killed_s, next_s)


def next_token_s(streams: Sequence[Sequence[float]], killed_s: float) -> float | None:
    """When the longest pause ended that spans the kill. Tokens that were under way arrive after it, so the pause may
    begin with the first of those."""
    pauses = [
        (b - a, b) for arrivals in streams for a, b in pairwise(arrivals) if a <= killed_s + AT_ONCE_S and b > killed_s
    ]
    return max(pauses)[1] if pauses else None


def _of_attention(told: Events, rank: int) -> dict[str, float]:
    given = [event["at_s"] for event in told if event["event"] == "request_resumed" and event["from_rank"] == rank]
    copied = [event for event in told if event["event"] == "stream_restored" and event["from_rank"] == rank]
    ends = {"notice": _noticed([*given[:1]], told, rank)}
    if given:
        ends["give away"] = max(given)
    if copied:
        ends["arrive"] = min(event["at_s"] - event["took_ms"] / 1e3 for event in copied)
        ends["copy"] = max(event["at_s"] for event in copied)
    return {phase: end_s for phase, end_s in ends.items() if end_s is not None}


def _of_expert(told: Events, rank: int) -> dict[str, float]:
    sent = [event["at_s"] for event in told if event["event"] == "rows_replayed" and event["suspect"] == rank]
    ends = {"notice": _noticed([], told, rank)} | ({"send again": max(sent)} if sent else {})
    return {phase: end_s for phase, end_s in ends.items() if end_s is not None}


def _noticed(others: list[float], told: Events, rank: int) -> float | None:
    names = ("suspected", "fault_detected")
    known = [event["at_s"] for event in told if event["event"] in names and event["rank"] == rank]
    return min([*known, *others], default=None)


def _durations(ends: Mapping[str, float], killed_s: float, next_s: float) -> dict[str, float]:
    """One that ended before the one before it took no time."""
    found, now_s = {}, killed_s
    for phase in PHASES:
        if phase in ends:
            end_s = min(max(ends[phase], now_s), next_s)
            found[phase] = round(1e3 * (end_s - now_s), 2)
            now_s = end_s
    return found
