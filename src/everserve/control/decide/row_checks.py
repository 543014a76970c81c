"""Rows that are computed twice, and what their bits say of those who have computed them. What follows from that is in
wrong_rows.py."""

from collections import defaultdict
from dataclasses import dataclass, field

from everserve.tables.ids import WorkerId
from everserve.wire.messages import RowComputed

_MOST_OPEN = 64  # what waits for a worker that has died is given up


@dataclass(slots=True)
class Check:
    """One row, and all that it was computed to, by whom."""

    row: RowComputed
    found: dict[WorkerId, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    waits_for: set[WorkerId] = field(default_factory=set)
    is_disputed: bool = False  # there were different bits, and all who hold the expert were asked

    @property
    def is_unanimous(self) -> bool:
        return len({value for values in self.found.values() for value in values}) <= 1

    def wrong(self) -> set[WorkerId]:
        """Those who compute wrong: they do not repeat themselves, or a majority contradicts them. Empty if that cannot
        be told."""
        unsteady = {worker for worker, values in self.found.items() if len(set(values)) > 1}
        if unsteady:
            return unsteady
        by_value: dict[bytes, set[WorkerId]] = defaultdict(set)
        for worker, values in self.found.items():
            by_value[values[0]].add(worker)
        most = max(by_value.values(), key=len)
        return set(self.found) - most if 2 * len(most) > len(self.found) else set()


class RowChecks:
    """Those that are under way, by number, the oldest first."""

    def __init__(self) -> None:
        self.open: dict[int, Check] = {}
        self._last = 0

    def begin(self, check: Check) -> int:
        self._last += 1
        self.open[self._last] = check
        if len(self.open) > _MOST_OPEN:
            del self.open[next(iter(self.open))]
        return self._last
