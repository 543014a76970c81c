"""One loss, and how the server went on: its phases as the typed events tell them, and what clients saw.

Phases follow each other on the way from the fault to the next token of the last stream that waits. Each ends with an
event; one that a way does not have, or that is not on its path to the next token, is None and takes no time:

                      detect      decide            move or switch      load                  publish
    redundant         suspected   (by its peers)    rows are replayed                         (not waited for)
    attention         suspected   declared gone     streams resumed     KV restored
    repair            suspected   repair planned                        last expert filled    streams continue
    mask              suspected   experts masked                                              streams continue
    switch            suspected   switch began      process started     ready, all filled     streams continue
    mask and switch   as mask; the switch goes on behind it, until the mask is lifted
    restart           all killed                    processes started   workers ready         serving

`first token` is the rest. Times are seconds of the machine's monotonic clock, which arrivals and events share.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from everserve.errors import EverserveError
from everserve_bench.incident import AT_ONCE_S, Victim
from everserve_bench.revive_variants import Variant

PHASES = ("detect", "decide", "move or switch", "load", "publish", "first token")
Events = Sequence[Mapping[str, Any]]


class Told:
    """The events of one loss, in order of time. What comes after its device was returned is not about the loss."""

    def __init__(self, events: Events, victim: Victim, until_s: float = math.inf) -> None:
        self.victim = victim
        self.events = [event for event in events if victim.killed_s <= event["at_s"] <= until_s]

    def times(self, name: str, since_s: float = 0.0, **fields: object) -> list[float]:
        return [event["at_s"] for event in self.named(name, **fields) if event["at_s"] >= since_s]

    def named(self, name: str, **fields: object) -> list[Mapping[str, Any]]:
        return [
            event
            for event in self.events
            if event["event"] == name and all(event[field] == value for field, value in fields.items())
        ]

    def times_of_victim(self, name: str) -> list[float]:
        return self.times(name, rank=self.victim.rank, incarnation=self.victim.incarnation)


# -- when each phase ended -----------------------------------------------------------------------

Ends = Mapping[str, float | None]  # of each phase but the last


def ends_of(variant: Variant, told: Told) -> Ends:
    """An error if what the variant is about did not happen."""
    gone = told.times_of_victim("fault_detected")
    if not gone:
        raise EverserveError(f"rank {told.victim.rank} was not declared gone")
    noticed_s = min(told.times_of_victim("suspected") + gone)
    return {"detect": noticed_s, **_WAYS[variant.name](told, gone[0])}


def _by_shadows(told: Told, gone_s: float) -> Ends:
    """Peers send rows again without asking; a worker that had none under way waits for nothing."""
    return {"move or switch": max(told.times("rows_replayed", suspect=told.victim.rank), default=None)}


def _by_log(told: Told, gone_s: float) -> Ends:
    resumed = told.times("request_resumed", from_rank=told.victim.rank)
    restored = told.times("stream_restored", from_rank=told.victim.rank)
    return {
        "decide": gone_s,
        "move or switch": _needed(resumed, "resumed streams"),
        "load": max(restored, default=None),
    }


def _by_repair(told: Told, gone_s: float) -> Ends:
    planned_s = _needed(told.times("repair_phase", phase="planned")[:1], "repair was planned")
    return {"decide": planned_s, **_filled(told)}


def _by_mask(told: Told, gone_s: float) -> Ends:
    masked_s = _needed(told.times("experts_masked")[:1], "expert was masked")
    return {"decide": masked_s, "publish": _continued(told, masked_s)}


def _by_switch(told: Told, gone_s: float) -> Ends:
    began = told.named("switch_began", role="expert")
    began_s = _needed([event["at_s"] for event in began][:1], "worker changed its role")
    started_s = _needed(told.times("worker_started", began_s, rank=began[0]["rank"])[:1], "process in the new role")
    ready_s = _needed(told.times("worker_became_ready", started_s, rank=began[0]["rank"])[:1], "ready stand-in")
    filled = _filled(told)
    return {"decide": began_s, "move or switch": started_s, **filled, "load": max(ready_s, filled["load"] or ready_s)}


_WAYS: dict[str, Callable[[Told, float], Ends]] = {
    "shadows": _by_shadows,
    "attention": _by_log,
    "repair": _by_repair,
    "mask": _by_mask,
    "switch": _by_switch,
    "mask-switch": _by_mask,
}


def _filled(told: Told) -> Ends:
    """Until every expert has a place, and streams use it."""
    covered_s = _needed(told.times("repair_phase", phase="covered")[-1:], "repair of all experts")
    filled = [at_s for at_s in told.times("experts_moved") if at_s <= covered_s]
    return {"load": max(filled, default=None), "publish": _continued(told, covered_s)}


def _continued(told: Told, published_s: float) -> float:
    """The last attention worker that waited has made a step. One that needed none of the experts did not wait, and one
    that waits later does so for another reason."""
    events = told.named("streams_continued")
    waited = [event["at_s"] for event in events if event["at_s"] - event["paused_s"] <= published_s <= event["at_s"]]
    return max(waited, default=published_s)


def ends_of_restart(events: Events, gone_s: float) -> Ends:
    """`events`: of the new server."""
    nothing = Victim(-1, 0, 0, gone_s)
    serving_s = _needed(Told(events, nothing).times("serving")[:1], "server that serves")
    told = Told(events, nothing, serving_s)
    return {
        "detect": gone_s,
        "move or switch": _needed(told.times("worker_started")[-1:], "started worker"),
        "load": _needed(told.times("worker_became_ready")[-1:], "ready worker"),
        "publish": serving_s,
    }


def _needed(times: Sequence[float], what: str) -> float:
    if not times:
        raise EverserveError(f"no {what} in the events after the loss")
    return max(times)


# -- what clients saw ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What a group of streams saw: from the fault to the next token of the one in the middle and of the last, and the
    longest pause. None: there is no such stream.
    """

    num: int
    next_median_ms: float | None
    next_last_ms: float | None
    gap_ms: float | None


Pause = tuple[float, float]  # between two tokens: from, to


def pause_of(arrivals_s: Sequence[float], fault_s: float, until_s: float) -> Pause | None:
    """The longest pause of a stream that spans the fault, or begins later but by `until_s`. Tokens that were under way
    arrive after the fault, so the next token of a stream that has to wait is the one that ends this pause. None: it did
    not run then."""
    pairs = [(a, b) for a, b in pairwise(arrivals_s) if b > fault_s and a <= until_s]
    return max(pairs, key=lambda pair: pair[1] - pair[0], default=None)


def seen(pauses: Iterable[Pause | None], fault_s: float, nexts_s: Iterable[float] | None = None) -> Seen:
    """`nexts_s`: the next tokens, where they are not the ends of the pauses."""
    known = [pause for pause in pauses if pause is not None]
    if not known:
        return Seen(0, None, None, None)
    nexts = sorted(1e3 * (at_s - fault_s) for at_s in nexts_s or (b for _, b in known))
    gap_ms = max(1e3 * (b - a) for a, b in known)
    return Seen(len(known), round(nexts[(len(nexts) - 1) // 2], 2), round(nexts[-1], 2), round(gap_ms, 2))


def seen_unhurt(streams: Sequence[Sequence[float]], fault_s: float, until_s: float) -> Seen:
    """Streams that do not wait: whatever arrives first after the fault is their next token."""
    running = [arrivals for arrivals in streams if pause_of(arrivals, fault_s, fault_s) is not None]
    nexts_s = [next(at_s for at_s in arrivals if at_s > fault_s) for arrivals in running]
    return seen((pause_of(arrivals, fault_s, until_s) for arrivals in running), fault_s, nexts_s)


@dataclass(frozen=True, kw_only=True)
class Round:
    """One loss."""

    variant: str
    rank: int
    phases_ms: dict[str, float | None]
    touched: Seen  # streams that had to wait: all that need a lost expert, or those of a lost attention worker
    untouched: Seen
    moved: Seen  # streams of a worker that changed its role: later, when they moved
    background_gap_ms: float | None  # the longest pause of any stream after its next token, until all is repaired
    lifted_s: float | None  # since the fault: experts are no longer masked
    redundant_s: float | None  # ... every expert has all its places
    whole_s: float | None  # ... at full strength, after the device was returned at `returned_s`
    returned_s: float | None
    num_streams: int
    num_tokens: int
    num_marked: int  # tokens under a mask
    num_lost: int
    num_different: int  # of tokens before the first mark
    others_lost: int  # workers that were declared gone although their device was there
    stolen: float


def phases_ms(ends: Ends, fault_s: float, next_s: float) -> dict[str, float | None]:
    """How long each took, in the order in which they follow: one that ended before the one before it took no time, and
    none lasts longer than until the token."""
    found: dict[str, float | None] = {}
    now_s = fault_s
    for phase in PHASES:
        end_s = next_s if phase == "first token" else ends.get(phase)
        if end_s is None:
            found[phase] = None
            continue
        end_s = min(max(end_s, now_s), next_s)
        found[phase] = round(1e3 * (end_s - now_s), 2)
        now_s = end_s
    return found


def last_end(ends: Ends, fault_s: float) -> float:
    """Until then a pause that begins is of the fault."""
    return max([fault_s + AT_ONCE_S, *(end_s for end_s in ends.values() if end_s is not None)])


def names_of(told: Told, event: str) -> set[str]:
    """Answers whose streams went to another worker: the ids that clients know."""
    return {one["request_id"].rpartition(".")[0].rpartition("-")[0] for one in told.named(event)}
