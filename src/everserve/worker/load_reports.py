"""What an expert worker tells of its load: the rows of each expert since it told last."""

from collections.abc import Sequence

from everserve.wire.messages import LoadReported


class LoadReports:
    """Makes differences of cumulative counters. Experts and layers without new rows are left out."""

    def __init__(self) -> None:
        self._told: list[list[int]] = []

    def next(self, counters: Sequence[Sequence[int]]) -> LoadReported | None:
        """The report for these counters, [index of the MoE layer][expert]; None if there were no rows."""
        told = self._told or [[0] * len(row) for row in counters]
        rows = {
            layer: {
                expert: now - before for expert, (now, before) in enumerate(zip(*pair, strict=True)) if now > before
            }
            for layer, pair in enumerate(zip(counters, told, strict=True))
        }
        self._told = [[*row] for row in counters]
        rows = {layer: experts for layer, experts in rows.items() if experts}
        return LoadReported(rows=rows) if rows else None
