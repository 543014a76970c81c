"""What is wrong, and what had happened just before."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

_MANY = 20  # with so many there is no point in going on; what happened is freshest now
_NUM_RECENT = 5


@dataclass(frozen=True)
class Finding:
    """One thing that should not be."""

    kind: str
    at_s: float | None  # since the storm began; None: before it
    where: str  # which stream, process or figure
    what: str
    faults_before: tuple[str, ...]  # the last few, the latest last

    def __str__(self) -> str:
        before = "".join(f"\n    before it: {fault}" for fault in self.faults_before)
        when = f"at {self.at_s:.2f} s" if self.at_s is not None else "before the storm"
        return f"{self.kind} {when}: {self.where}: {self.what}{before}"


class Findings:
    """All of them. `too_many` is set when the run should end."""

    def __init__(self, recent_faults: Callable[[], list[str]] = list) -> None:
        self.began_s: float | None = None  # the storm
        self.all: list[Finding] = []
        self.too_many = asyncio.Event()
        self.recent_faults = recent_faults

    def add(self, kind: str, where: str, what: str) -> None:
        at_s = round(time.perf_counter() - self.began_s, 3) if self.began_s is not None else None
        self.all.append(Finding(kind, at_s, where, what, tuple(self.recent_faults()[-_NUM_RECENT:])))
        if len(self.all) >= _MANY:
            self.too_many.set()

    def by_kind(self) -> Counter[str]:
        return Counter(finding.kind for finding in self.all)
