"""What an instance begins with, and keeps for good: its seats, where experts live, what all workers have in common."""

import logging
from dataclasses import dataclass
from pathlib import Path

from everserve.datapath.lane import LaneShape
from everserve.engine.sizing import KvSizes
from everserve.model.config import ModelConfig
from everserve.orchestrator.seats import SeatSpec
from everserve.plan.placement import place_experts, survivable_deaths
from everserve.runtime.events import PlacementMade
from everserve.runtime.messages import StartOrchestrator, WorkerSettings
from everserve.tables.ids import Rank, Role
from everserve.tables.placement import Placement, SeatSlots

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Design:
    """Attention seats first, then expert seats. Without expert seats every seat has both roles, and no placement."""

    seats: tuple[SeatSpec, ...]
    placement: Placement | None
    settings: WorkerSettings
    lane_bytes: int
    log_bytes: int  # 0: no logs

    @classmethod
    def of(cls, start: StartOrchestrator) -> "Design":
        """Raises UserError if the model cannot be served like this."""
        model = ModelConfig.from_directory(Path(start.model))
        expert_ranks = [Rank(start.num_attention + i) for i in range(start.num_expert)]
        roles: tuple[Role, ...] = (Role.ATTENTION, Role.EXPERT)
        slots, placement = model.num_experts, None
        if expert_ranks:
            placement = place_experts(model.num_experts, model.moe_layers, expert_ranks, start.shadow_experts)
            roles, slots = (Role.ATTENTION,), 0
        attention = [SeatSpec(rank=Rank(i), roles=roles, slots=slots) for i in range(start.num_attention)]
        experts = [SeatSpec(rank=rank, roles=(Role.EXPERT,)) for rank in expert_ranks]
        shape = LaneShape.of(model, start.worker.max_num_batched_tokens)
        log_bytes = KvSizes.of(model, start.worker).log.num_bytes if start.worker.kv_log != "off" else 0
        return cls((*attention, *experts), placement, start.worker, shape.lane_bytes(), log_bytes)

    def roles_of(self, rank: Rank) -> tuple[Role, ...]:
        return next(seat.roles for seat in self.seats if seat.rank == rank)

    def slots_of(self, rank: Rank) -> SeatSlots | None:
        """The expert slots of this seat; None where the placement does not name it."""
        seats = self.placement.seats if self.placement is not None else ()
        return next((seat for seat in seats if seat.rank == rank), None)


def describe(placement: Placement) -> PlacementMade:
    """Say how many deaths the placement survives: in the log, and as an event."""
    seat, deaths = placement.seats[0], survivable_deaths(placement)
    num_shadow = seat.num_slots - seat.num_active
    log.info(
        "%d expert workers with %d active and %d shadow experts per layer each: %s",
        len(placement.seats), seat.num_active, num_shadow,
        f"any {deaths} may die at once without a pause" if deaths else "every death makes streams wait",
    )  # fmt: skip
    return PlacementMade(
        process="orchestrator",
        num_expert_workers=len(placement.seats),
        active_per_worker=seat.num_active,
        shadow_per_worker=num_shadow,
        survivable_deaths=deaths,
    )
