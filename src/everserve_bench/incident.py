"""One kill: what the typed events tell, and what clients saw."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from everserve.client import percentile
from everserve.errors import EverserveError
from everserve_bench import analysis

WITHIN_S = 1.0  # a gap that begins later than this, and later than full strength, is not the kill's
AT_ONCE_S = 0.1  # ... and one that begins later than this comes from the successor's start, not from the failover
BIN_S = 0.05


@dataclass(frozen=True)
class Victim:
    """Which process was killed, and when the signal was sent."""

    rank: int
    incarnation: int
    pid: int
    killed_s: float


@dataclass(frozen=True)
class Incident:
    """What the server did about it. Times are seconds since the signal."""

    suspected_s: float | None  # a peer routed around it; None if it had no requests at that moment
    detected_s: float  # the orchestrator declared it gone
    rows_replayed: int
    requests_resumed: int
    tokens_restored: int  # whose KV came from the victim's log
    tokens_recomputed: float  # per request that moved: all of it where nothing came from a log
    ready_s: float  # its successor has its weights
    others_lost: int  # workers that were declared gone although they were not killed


def tell(events: list[dict[str, Any]], victim: Victim, num_prompt: int = 0) -> Incident:
    """All that the events say about this death; an error if it did not happen. Prompts have `num_prompt` tokens."""
    later = [event for event in events if event["at_s"] >= victim.killed_s]
    same = [
        event for event in later if (event.get("rank"), event.get("incarnation")) == (victim.rank, victim.incarnation)
    ]
    suspected = _times(same, "suspected")
    detected = _times(same, "fault_detected")
    ready = [
        event["at_s"]
        for event in later
        if event["event"] == "worker_became_ready"
        and event["rank"] == victim.rank
        and event["incarnation"] > victim.incarnation
    ]
    if not detected or not ready:
        raise EverserveError(f"no death or no successor in the events of rank {victim.rank} after the kill")
    restored = [e for e in later if e["event"] == "stream_restored" and e["from_rank"] == victim.rank]
    until_s = min(ready)  # what happens under the successor is not about this death
    resumed = [
        event
        for event in later
        if event["event"] == "request_resumed" and event["from_rank"] == victim.rank and event["at_s"] <= until_s
    ]
    return Incident(
        suspected_s=min(suspected) - victim.killed_s if suspected else None,
        detected_s=min(detected) - victim.killed_s,
        rows_replayed=sum(
            event["num_rows"]
            for event in later
            if event["event"] == "rows_replayed" and event["suspect"] == victim.rank and event["at_s"] <= until_s
        ),
        requests_resumed=len(resumed),
        tokens_restored=sum(event["num_restored"] for event in restored),
        tokens_recomputed=_recomputed_per_request(resumed, restored, num_prompt),
        ready_s=min(ready) - victim.killed_s,
        others_lost=len(_times(later, "fault_detected")) - len(detected),
    )


def _recomputed_per_request(resumed: list[dict[str, Any]], restored: list[dict[str, Any]], num_prompt: int) -> float:
    """A stream of which nothing came from a log is computed again up to the token before the last one that its client
    has. One that had no token yet does not count: how much of its prompt was computed is not known."""
    ids = {event["request_id"] for event in restored}
    whole = [
        num_prompt + event["num_known"] - 1
        for event in resumed
        if event["request_id"] not in ids and event["num_known"] > 0
    ]
    recomputed: list[int] = [event["num_recomputed"] for event in restored] + whole
    return sum(recomputed) / max(len(recomputed), 1)


def _times(events: list[dict[str, Any]], name: str) -> list[float]:
    return [event["at_s"] for event in events if event["event"] == name]


# -- what clients saw ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Round:
    """One kill. Milliseconds are what clients saw; seconds count from the signal."""

    fault: str  # expert, attention or restart
    rank: int | None
    normal_p50_ms: float
    normal_p99_ms: float
    normal_largest_ms: float  # in the second before the kill
    gaps_ms: list[float]  # the largest of each stream
    gap_ms: float  # the largest of all
    gap_at_once_ms: float | None  # the largest that began within 100 ms
    excess_ms: float  # over the normal p99
    incident: Incident | None
    phases_ms: dict[str, float]  # from the signal to the next token (kill_phases.py)
    whole_s: float  # at full strength
    num_streams: int
    num_tokens: int
    num_lost: int
    num_different: int
    stolen: float
    series: analysis.Series


def judge(
    fault: str,
    streams: Sequence[Sequence[float]],
    *,
    killed_s: float,
    rank: int | None,
    verdicts: Sequence[analysis.Verdict],
    end_s: float,
    whole_s: float,
    stolen: float,
    warm_s: float,
    told: Incident | None,
    phases_ms: dict[str, float] | None = None,
) -> Round:
    """All figures of one kill, from the arrival times of all streams."""
    normal = [gap for arrivals in streams for gap in analysis.gaps_between(arrivals, killed_s - warm_s, killed_s)]
    before = [gap for arrivals in streams for gap in analysis.gaps_between(arrivals, killed_s - WITHIN_S, killed_s)]
    within_s = max(WITHIN_S, whole_s - killed_s + AT_ONCE_S)  # streams may also wait when the successor joins
    gaps = _known(analysis.largest_gap(arrivals, killed_s, within_s) for arrivals in streams)
    at_once = _known(analysis.largest_gap(arrivals, killed_s, AT_ONCE_S) for arrivals in streams)
    if not normal or not gaps:
        raise EverserveError("no stream was running at the time of the kill: give --tokens a larger value")
    p99 = percentile(normal, 0.99)
    return Round(
        fault=fault,
        rank=rank,
        normal_p50_ms=1e3 * percentile(normal, 0.5),
        normal_p99_ms=1e3 * p99,
        normal_largest_ms=1e3 * max(before, default=float("nan")),
        gaps_ms=[round(1e3 * gap, 2) for gap in gaps],
        gap_ms=1e3 * max(gaps),
        gap_at_once_ms=1e3 * max(at_once) if at_once else None,
        excess_ms=1e3 * (max(gaps) - p99),
        incident=told,
        phases_ms=phases_ms or {},
        whole_s=whole_s - killed_s,
        num_streams=len(verdicts),
        num_tokens=sum(verdict.num_tokens for verdict in verdicts),
        num_lost=sum(verdict.num_lost for verdict in verdicts),
        num_different=sum(verdict.num_different for verdict in verdicts),
        stolen=stolen,
        series=analysis.series(streams, killed_s, -warm_s, end_s - killed_s, BIN_S),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
