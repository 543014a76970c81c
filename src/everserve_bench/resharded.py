"""One loss of a divided instance, and what planners would move for it: numbers in, numbers out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everserve.tables.ids import Rank
from everserve_bench import incident, repaired
from everserve_bench.planners.reshard import PLANNERS, Row, lost_bytes

_COUNTED = (
    "bytes",
    "recomputed",
    "restored",
    "preemptions",
    "kv_regained",
    "kv_lost",
)  # in names of counters of what was moved


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What clients saw, and what the server moved."""

    variant: str
    num_devices: int
    pauses_ms: list[float]  # of each stream that was running, the longest time between two tokens around the loss
    normal_p99_ms: float
    whole_s: float
    bytes_by_source: dict[str, int]
    counted: dict[str, float]  # how counters of the server changed, from before the load until all was repaired
    num_streams: int
    num_tokens: int
    num_missing: int
    num_different: int
    stolen: float

    @classmethod
    def of_device(cls, variant: str, num_devices: int, found: repaired.Round, counted: Mapping[str, float]) -> "Loss":
        return cls(
            variant=variant,
            num_devices=num_devices,
            pauses_ms=found.gaps_ms,
            normal_p99_ms=found.normal_p99_ms,
            whole_s=found.whole_s,
            bytes_by_source=found.repair.bytes_by_source,
            counted=dict(counted),
            num_streams=found.num_streams,
            num_tokens=found.num_tokens,
            num_missing=found.num_missing,
            num_different=found.num_different,
            stolen=found.stolen,
        )

    @classmethod
    def of_kill(cls, variant: str, num_devices: int, found: incident.Round, counted: Mapping[str, float]) -> "Loss":
        return cls(
            variant=variant,
            num_devices=num_devices,
            pauses_ms=found.gaps_ms,
            normal_p99_ms=found.normal_p99_ms,
            whole_s=found.whole_s,
            bytes_by_source={},
            counted=dict(counted),
            num_streams=found.num_streams,
            num_tokens=found.num_tokens,
            num_missing=found.num_lost,
            num_different=found.num_different,
            stolen=found.stolen,
        )


def counted(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Counters that tell what was moved or computed again, and have changed."""
    names = (name for name in after if any(part in name for part in _COUNTED))
    changes = {name: after[name] - before.get(name, 0.0) for name in names}
    return {name: change for name, change in changes.items() if change}


def planned(rows: Sequence[Row], num_devices: int) -> dict[str, dict[str, Any]]:
    """What each planner moves if one of so many devices is lost: the mean over all of them, and of the fewest bytes
    that must be reloaded. A device's link carries what it reloads; `most` is that of the busiest."""
    ranks = [Rank(rank) for rank in range(num_devices)]
    found: dict[str, dict[str, Any]] = {}
    for name, planner in PLANNERS.items():
        plans = [planner(rows, [rank for rank in ranks if rank != lost]) for lost in ranks]
        found[name] = {
            "reload_bytes": _mean([plan.reload_bytes for plan in plans]),
            "peer_bytes": _mean([plan.peer_bytes for plan in plans]),
            "kept_bytes": _mean([plan.kept_bytes for plan in plans]),
            "most_reload_bytes": _mean([max(plan.reloaded_by().values()) for plan in plans]),
            "fewest_bytes": _mean([lost_bytes(rows, [rank for rank in ranks if rank != lost]) for lost in ranks]),
        }
    return found


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers)
