"""What moved, and how long repairs took, for `/metrics`."""

from collections import Counter, defaultdict

from everserve.gateway.streams.metrics import Histogram
from everserve.tables.slots import Source
from everserve.wire.events import AnyEvent, ExpertsMoved, RepairPhase

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Repairs:
    """Seconds from the detection of a loss to each phase of its repair; experts and bytes by source."""

    def __init__(self) -> None:
        self.by_phase: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(_SECONDS))
        self.num_moved: Counter[str] = Counter(dict.fromkeys(Source, 0))
        self.num_bytes: Counter[str] = Counter(dict.fromkeys(Source, 0))

    def on_event(self, event: AnyEvent) -> None:
        if isinstance(event, RepairPhase):
            self.by_phase[event.phase].observe(event.since_s)
        elif isinstance(event, ExpertsMoved):
            self.num_moved[event.source] += event.num_experts
            self.num_bytes[event.source] += event.num_bytes
