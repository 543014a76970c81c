"""One loss of devices: what the typed events tell of its repair, and what clients saw."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from everserve.client import percentile
from everserve.errors import EverserveError
from everserve_bench import analysis
from everserve_bench.incident import BIN_S, WITHIN_S
from everserve_bench.repair_cases import Case

Events = list[dict[str, Any]]


@dataclass(frozen=True)
class Repair:
    """What the server did about it. Times are seconds since the loss."""

    detected_s: float  # the last of the lost workers was declared gone
    num_without_place: int  # experts, over all layers, at worst
    planned_s: float | None  # lost experts have other places to go to; None: that was not necessary
    first_slot_s: float | None  # the first of them is there
    covered_s: float  # every expert has a place
    redundant_s: float  # every expert has all its places
    paused_s: float  # the longest that an attention worker waited for experts without a place
    bytes_by_source: dict[str, int]  # of the weights that were copied; empty if the server does not tell
    others_lost: int  # workers that were declared gone although they were not on a lost device
    experts_by_source: dict[str, int] = field(default_factory=dict)  # how many; mapped ones are not copied


def tell(events: Events, lost: Mapping[int, int], lost_s: float, until_s: float) -> Repair:
    """`lost`: ranks with their incarnations. An error if they were not lost, or if the repair is not complete."""
    later = [event for event in events if lost_s <= event["at_s"] <= until_s]
    declared = {(e["rank"], e["incarnation"]): e["at_s"] for e in later if e["event"] == "fault_detected"}
    missing = lost.items() - declared.keys()
    if missing:
        raise EverserveError(f"ranks {sorted(rank for rank, _ in missing)} were not declared gone")
    phases = [event for event in later if event["event"] == "repair_phase"]
    redundant_s = max(_times(phases, "redundant"), default=None)
    covered_s = max(
        (at_s for at_s in _times(phases, "covered") if redundant_s is not None and at_s <= redundant_s), default=None
    )
    if redundant_s is None or covered_s is None:
        raise EverserveError("the loss was not repaired")
    paused = [event["paused_s"] for event in later if event["event"] == "streams_continued"]
    return Repair(
        detected_s=max(declared[worker] for worker in lost.items()) - lost_s,
        num_without_place=max(event["num_experts_without_place"] for event in phases),
        planned_s=min((at_s - lost_s for at_s in _times(phases, "planned")), default=None),
        first_slot_s=min((at_s - lost_s for at_s in _times(phases, "first slot")), default=None),
        covered_s=covered_s - lost_s,
        redundant_s=redundant_s - lost_s,
        paused_s=max(paused, default=0.0),
        bytes_by_source=bytes_by_source(later),
        others_lost=len(declared.keys() - lost.items()),
        experts_by_source=experts_by_source(later),
    )


def is_complete(events: Events, lost: Mapping[int, int], lost_s: float) -> bool:
    """Whether all are declared gone and everything is where it should be without them."""
    declared = [
        event["at_s"]
        for event in events
        if event["event"] == "fault_detected" and lost.get(event["rank"]) == event["incarnation"]
    ]
    done = _times([event for event in events if event["event"] == "repair_phase"], "redundant")
    return len(declared) == len(lost) and max(done, default=0.0) >= max(*declared, lost_s)


def _times(phases: Events, phase: str) -> list[float]:
    """A phase is told again if the next device is lost after it."""
    return [event["at_s"] for event in phases if event["phase"] == phase]


def bytes_by_source(events: Events) -> dict[str, int]:
    """The bytes of all events that tell where the weights of a slot came from, alone or in a list of filled slots."""
    filled = [one for event in events for one in event.get("filled", (event,))]
    found: Counter[str] = Counter()
    for one in filled:
        if "source" in one and "num_bytes" in one:
            found[one["source"]] += one["num_bytes"]
    return dict(sorted(found.items()))


def experts_by_source(events: Events) -> dict[str, int]:
    """How many slots were filled, likewise."""
    found: Counter[str] = Counter()
    for event in events:
        if "source" in event and "num_experts" in event:
            found[event["source"]] += event["num_experts"]
    return dict(sorted(found.items()))


# -- what clients saw ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of the machine's monotonic clock."""

    lost_s: float
    settled_s: float  # every expert has all its places, without the devices that are gone
    returned_s: float | None  # those are given back
    whole_s: float  # full strength
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Round:
    """One loss. Milliseconds are what clients saw; seconds count from the loss, unless said otherwise."""

    case: str
    num_lost: int
    fault: str
    shadows: str
    num_shadows: int
    devices: list[int]
    normal_p50_ms: float
    normal_p99_ms: float
    gaps_ms: list[float]  # the largest of each stream that was running, until the repair is complete
    gap_ms: float  # the largest of any stream
    excess_ms: float  # over the normal p99
    return_gap_ms: float | None  # the same from the return of the devices to full strength
    repair: Repair
    whole_s: float  # at full strength: since the loss; since the return, where devices return
    tokens_per_s_before: float
    tokens_per_s_during: float  # until the repair is complete, at least one second
    tokens_per_s_after: float
    tokens_per_s_returned: float | None
    num_streams: int
    num_tokens: int
    num_missing: int
    num_different: int
    stolen: float
    series: analysis.Series


def judge(
    case: Case,
    devices: Collection[int],
    streams: Sequence[Sequence[float]],
    *,
    times: Times,
    verdicts: Sequence[analysis.Verdict],
    stolen: float,
    warm_s: float,
    repair: Repair,
) -> Round:
    """All figures of one loss, from the arrival times of all streams."""
    lost_s, settled_s, returned_s = times.lost_s, times.settled_s, times.returned_s
    normal = [gap for arrivals in streams for gap in analysis.gaps_between(arrivals, lost_s - warm_s, lost_s)]
    gaps_s = _gaps(streams, lost_s, settled_s)
    if not normal or not gaps_s:
        raise EverserveError("no stream was running at the time of the loss: give --tokens a larger value")
    p99, gap_s = percentile(normal, 0.99), max(gaps_s)
    during_until_s = max(settled_s, lost_s + WITHIN_S)
    after_until_s = returned_s if returned_s is not None else times.end_s
    is_returned = returned_s is not None
    return_gap_s = _largest(streams, returned_s, times.whole_s) if returned_s is not None else None
    return Round(
        case=str(case),
        **asdict(case),
        devices=list(devices),
        normal_p50_ms=1e3 * percentile(normal, 0.5),
        normal_p99_ms=1e3 * p99,
        gaps_ms=[round(1e3 * gap, 2) for gap in gaps_s],
        gap_ms=1e3 * gap_s,
        excess_ms=1e3 * (gap_s - p99),
        return_gap_ms=1e3 * return_gap_s if return_gap_s is not None else None,
        repair=repair,
        whole_s=times.whole_s - (returned_s if returned_s is not None else lost_s),
        tokens_per_s_before=analysis.rate(streams, lost_s - warm_s, lost_s),
        tokens_per_s_during=analysis.rate(streams, lost_s, during_until_s),
        tokens_per_s_after=analysis.rate(streams, settled_s, after_until_s),
        tokens_per_s_returned=analysis.rate(streams, times.whole_s, times.end_s) if is_returned else None,
        num_streams=len(verdicts),
        num_tokens=sum(verdict.num_tokens for verdict in verdicts),
        num_missing=sum(verdict.num_lost for verdict in verdicts),
        num_different=sum(verdict.num_different for verdict in verdicts),
        stolen=stolen,
        series=analysis.series(streams, lost_s, -warm_s, times.end_s - lost_s, BIN_S),
    )


def _largest(streams: Sequence[Sequence[float]], at_s: float, until_s: float) -> float | None:
    return max(_gaps(streams, at_s, until_s), default=None)


def _gaps(streams: Sequence[Sequence[float]], at_s: float, until_s: float) -> list[float]:
    """The largest gap of each stream that spans the moment, or begins before the end (or within a second, if that is
    later)."""
    within_s = max(until_s - at_s, WITHIN_S)
    gaps = (analysis.largest_gap(arrivals, at_s, within_s) for arrivals in streams)
    return [gap for gap in gaps if gap is not None]
