"""How many more expert workers may die before an expert has no place left.

When the orchestrator has made the placement it says how many may die at once; each expert worker that is not ready now
counts as one of them. This is a lower bound: depending on which workers die, more may be survivable.
"""

from everserve.tables.ids import Role
from everserve.tables.members import Members, WorkerState
from everserve.wire.events import AnyEvent, PlacementMade


class ExpertRedundancy:
    """Survivable deaths: planned, and left now."""

    def __init__(self) -> None:
        self._num_planned: int | None = None  # None: there are no expert workers, or no placement yet

    def on_event(self, event: AnyEvent) -> None:
        if isinstance(event, PlacementMade):
            self._num_planned = event.survivable_deaths

    def num_left(self, members: Members | None) -> int | None:
        """None without expert workers."""
        if self._num_planned is None or members is None:
            return None
        experts = [worker for worker in members.workers if worker.roles == (Role.EXPERT,)]
        num_missing = sum(worker.state is not WorkerState.READY for worker in experts)
        return max(0, self._num_planned - num_missing)
