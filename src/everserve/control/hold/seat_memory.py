"""When memory of seats is let go of."""

from collections.abc import Callable
from dataclasses import dataclass

from everserve.control.hold.catalog import Catalog
from everserve.control.hold.log_references import Logs
from everserve.control.hold.needs import Needs
from everserve.tables.goal import Goal
from everserve.tables.ids import Rank
from everserve.tables.memory import Kind, MemoryName, seat_owner


@dataclass(frozen=True, kw_only=True)
class SeatMemory:
    """The memory that the anchor owns for workers: it outlives them."""

    catalog: Catalog
    needs: Needs
    logs: Logs
    goal: Callable[[], Goal]

    def retire(self, rank: Rank) -> None:
        """This seat is not filled again."""
        for owner in self.needs.seat_owners(self.goal(), rank):
            for memory in self.catalog.held_by(owner):
                self.catalog.release(memory)

    def change_role(self, rank: Rank) -> None:
        """What the seat had in its earlier role is not needed any more, nor what seats shared with it; workers that
        still use it keep it mapped."""
        goal, of_experts = self.goal(), self._of_experts(rank)
        needed = {piece for seat in goal.seats for piece in self.needs.memory(goal, seat_owner(seat.rank))}
        for owner in [seat_owner(seat.rank) for seat in goal.seats]:
            for memory in self.catalog.held_by(owner):
                if memory.need not in needed or memory in of_experts:
                    self.catalog.release(memory)

    def _of_experts(self, rank: Rank) -> set[MemoryName]:
        """The weights that the seat has had for experts."""
        weights = (Kind.WEIGHTS, Kind.WEIGHTS_STATE)
        return {
            piece for piece in self.catalog.offered if piece.owners == (seat_owner(rank),) and piece.kind in weights
        }

    def drop_device(self, device: int) -> None:
        """Nothing that was kept in its memory is there any more, also not for a new orchestrator."""
        self.logs.lose_device(device)
        for memory in self.catalog.on_device(device):
            self.catalog.release(memory)

    def drop_host(self, host: int) -> None:
        """All its memory is lost."""
        self.catalog.forget_requests(host)
        self.logs.lose_host(host)
        for memory in self.catalog.on_host(host):
            self.catalog.release(memory)
