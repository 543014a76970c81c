"""What a fleet has given: capacity over time, pauses of streams, how even the work was, bytes that were moved."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Account:
    """What one instance has given, or several. `pauses`: how many streams waited for so long, at one time."""

    seconds: float = 0.0
    capacity_s: float = 0.0  # 1 where all workers serve
    uneven_s: float = 0.0  # the most loaded expert worker's work over the mean, while all experts had a place
    even_for_s: float = 0.0  # for so long
    pauses: Counter[float] = field(default_factory=Counter)
    weights_bytes: float = 0.0
    kv_bytes: float = 0.0

    def pause(self, seconds: float, num_streams: int) -> None:
        if num_streams and seconds > 0:
            self.pauses[round(seconds, 3)] += num_streams

    def pass_time(self, seconds: float, capacity: float, imbalance: float | None = None) -> None:
        """So long, with this share of the workers; an imbalance only where there was work."""
        self.seconds += seconds
        self.capacity_s += seconds * capacity
        if imbalance is not None:
            self.uneven_s += seconds * imbalance
            self.even_for_s += seconds

    def as_json(self, num_streams: int) -> dict[str, Any]:
        """`num_streams`: of one instance, for rates."""
        stream_years = self.seconds * num_streams / (365 * 86_400)
        total = sum(self.pauses.values())
        long = sum(number for seconds, number in self.pauses.items() if seconds > 1)
        return {
            "capacity": self.capacity_s / self.seconds if self.seconds else 1.0,
            "imbalance": self.uneven_s / self.even_for_s if self.even_for_s else None,
            "pauses_per_stream_year": total / stream_years if stream_years else 0.0,
            "pauses_over_1s_per_stream_year": long / stream_years if stream_years else 0.0,
            "paused_s_per_stream_year": (
                sum(seconds * number for seconds, number in self.pauses.items()) / stream_years if stream_years else 0.0
            ),
            "pause_s": {name: self._quantile(share) for name, share in _QUANTILES},
            "weights_tb": self.weights_bytes / 1e12,
            "kv_tb": self.kv_bytes / 1e12,
        }

    def _quantile(self, share: float) -> float:
        left = share * sum(self.pauses.values())
        for seconds in sorted(self.pauses):
            left -= self.pauses[seconds]
            if left <= 0:
                return seconds
        return 0.0


_QUANTILES = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))


def total(accounts: Iterable[Account]) -> Account:
    """Returns the sum of all of them."""
    found = Account()
    for one in accounts:
        found.seconds += one.seconds
        found.capacity_s += one.capacity_s
        found.uneven_s += one.uneven_s
        found.even_for_s += one.even_for_s
        found.pauses.update(one.pauses)
        found.weights_bytes += one.weights_bytes
        found.kv_bytes += one.kv_bytes
    return found
