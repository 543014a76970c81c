"""How many more expert workers may die before an expert has no place left.

The orchestrator says once, when it has made the placement, how many may die at once; each that is not ready now is one
of them. It may be more: which ones die makes a difference. It is never less.
"""

from everserve.tables.ids import Role
from everserve.tables.members import Members, WorkerState
from everserve.wire.events import AnyEvent, PlacementMade


class ExpertRedundancy:
    """What was planned, and what is left of it."""

    def __init__(self) -> None:
        self._num_planned: int | None = None  # None: there are no expert workers, or nobody has said yet

    def on_event(self, event: AnyEvent) -> None:
        if isinstance(event, PlacementMade):
            self._num_planned = event.survivable_deaths

    def num_left(self, members: Members | None) -> int | None:
        """None where no worker has experts that others need."""
        if self._num_planned is None or members is None:
            return None
        experts = [worker for worker in members.workers if worker.roles == (Role.EXPERT,)]
        num_missing = sum(worker.state is not WorkerState.READY for worker in experts)
        return max(0, self._num_planned - num_missing)
