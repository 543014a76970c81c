"""All that a run found, as a table for people and as JSON for machines."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from everserve.chaos.compare import Kind
from everserve.chaos.faults import InjectedFault
from everserve.chaos.findings import Finding
from everserve.chaos.leaks import Snapshot
from everserve.chaos.tally import Tally, spread_ms
from everserve.words import count

_LEAKS = (
    "processes",
    "strays",
    "descriptors",
    "mappings",
    "memories",
    "memory_bytes",
    "resident_bytes",
    "device_bytes",
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Complete when the run is."""

    seed: int
    settings: dict[str, Any]
    seconds: float  # how long the storm was
    faults: Sequence[InjectedFault]
    tally: Tally
    num_undisturbed: int  # answers compared before and after the storm
    findings: Sequence[Finding]
    before: Snapshot | None  # None: the server is on another host
    after: Snapshot | None
    whole_after_s: float | None  # full strength, since the end of the storm; None: not reached
    notes: Sequence[str]
    kept: str | None = None  # directory with the server's log and events

    @property
    def is_good(self) -> bool:
        return not self.findings

    @property
    def line(self) -> str:
        """The verdict in one sentence."""
        num_hit = sum(fault.is_injected for fault in self.faults)
        num_tokens = self.tally.num_tokens - self.tally.num_masked
        faults, requests = count(num_hit, "fault"), count(self.tally.num_streams, "request")
        what = f"{faults}, {requests}, {num_tokens} tokens compared"
        if self.is_good:
            but = f" ({self.tally.num_masked} tokens under a mask are marked)" if self.tally.num_masked else ""
            return f"every stream is exact{but}: {what}, seed {self.seed}"
        return f"FAILED with {count(len(self.findings), 'finding')}: {what}, seed {self.seed}"

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "is_good": self.is_good,
            "settings": self.settings,
            "seconds": round(self.seconds, 1),
            "faults": self._faults_by_kind(),
            "requests": dict(self.tally.manners),
            "tokens_compared": self.tally.num_tokens - self.tally.num_masked,
            "tokens_masked": self.tally.num_masked,
            "continuations_compared": len(self.tally.continuations),
            "continuations_not_compared": self.tally.num_unasked,
            "undisturbed_answers_compared": self.num_undisturbed,
            "resumes": self.tally.num_resumes,
            "gaps_between_events_ms": spread_ms(self.tally.gaps_s),
            "time_to_first_event_ms": spread_ms(self.tally.firsts_s),
            "longest_gaps": [asdict(stall) for stall in self.tally.longest],
            "full_strength_after_s": self.whole_after_s,
            "leaks": {
                "before": self.before.as_json() if self.before else None,
                "after": self.after.as_json() if self.after else None,
            },
            "findings_by_kind": dict(self._findings_by_kind()),
            "findings": [asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
            "every_fault": [str(fault) for fault in self.faults],
        }

    def show(self, console: Console) -> None:
        console.print(Group(*self._parts()), highlight=False)

    # -- parts -----------------------------------------------------------------------------------

    def _parts(self) -> list[RenderableType]:
        parts: list[RenderableType] = [self._faults_table(), self._streams_table()]
        if self.before is not None:
            parts.append(self._leaks_table())
        parts += [Text(f"note: {note}") for note in self.notes]
        parts += [Text(str(finding), style="red") for finding in self.findings]
        if self.kept is not None:
            parts.append(Text(f"the server's log and events are in {self.kept}"))
        parts.append(Text(self.line, style="bold green" if self.is_good else "bold red"))
        return parts

    def _faults_table(self) -> Table:
        table = _table("Faults", "kind", "injected", "missed")
        kinds = self._faults_by_kind()
        for kind, counts in kinds.items():
            table.add_row(kind, str(counts["injected"]), str(counts["missed"]))
        totals = [str(sum(counts[what] for counts in kinds.values())) for what in ("injected", "missed")]
        table.add_row("all", *totals, style="bold")
        return table

    def _streams_table(self) -> Table:
        tally, found = self.tally, self._findings_by_kind()
        between, first = spread_ms(tally.gaps_s), spread_ms(tally.firsts_s)
        manners = ", ".join(f"{count} {manner}" for manner, count in sorted(tally.manners.items()))
        whole = "not reached" if self.whole_after_s is None else f"{self.whole_after_s:.1f} s after the storm"
        table = _table(f"Streams, {self.seconds:.0f} s", "", "")
        table.add_row("requests", f"{tally.num_streams}: {manners}" if manners else "0")
        table.add_row("tokens compared", str(tally.num_tokens - tally.num_masked))
        if tally.num_masked:
            num = len(tally.continuations)
            table.add_row("tokens under a mask, marked", str(tally.num_masked))
            table.add_row("continuations after a mask, compared", f"{num} of {num + tally.num_unasked}")
        table.add_row("resumes", str(tally.num_resumes))
        table.add_row("answers compared before and after", str(self.num_undisturbed))
        table.add_row("gaps between events, p50 / p99 / max", _spread(between))
        table.add_row("time to the first event, p50 / p99 / max", _spread(first))
        table.add_row("full strength", whole)
        for kind in dict.fromkeys([*(kind.value for kind in Kind), *found]):
            table.add_row(f"finding: {kind}", str(found[kind]), style="red" if found[kind] else "")
        return table

    def _leaks_table(self) -> Table:
        assert self.before is not None
        before, after = self.before.totals, self.after.totals if self.after else {}
        table = _table("What the processes hold", "", "before", "after")
        for name in _LEAKS if before["device_bytes"] else _LEAKS[:-1]:
            table.add_row(name.replace("_", " "), str(before[name]), str(after.get(name, "")))
        return table

    def _faults_by_kind(self) -> dict[str, dict[str, int]]:
        kinds: dict[str, dict[str, int]] = {}
        for fault in sorted(self.faults, key=lambda fault: fault.kind):
            counts = kinds.setdefault(fault.kind, {"injected": 0, "missed": 0})
            counts["injected" if fault.is_injected else "missed"] += 1
        return kinds

    def _findings_by_kind(self) -> Counter[str]:
        return Counter(finding.kind for finding in self.findings)


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", show_header=any(columns))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _spread(figures: dict[str, float]) -> str:
    return " / ".join(f"{figures[name]:.1f}" for name in ("p50", "p99", "max")) + " ms"
