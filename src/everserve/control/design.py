"""What an instance starts with: the capacity that it allocates once, and the first goal."""

import logging
from collections.abc import Sequence

from everserve.backends.cpu.lane import LaneShape
from everserve.engine.sizing import KvSizes
from everserve.model.config import ModelConfig
from everserve.plan.placement import place_experts, survivable_deaths
from everserve.tables.goal import Capacity, Goal, SeatGoal
from everserve.tables.ids import NO_DEVICE, Rank, Role
from everserve.tables.placement import Placement
from everserve.wire.events import PlacementMade
from everserve.wire.messages import StartOrchestrator, WorkerSettings

log = logging.getLogger(__name__)


def first_goal(start: StartOrchestrator, model: ModelConfig) -> Goal:
    """The configured workers, assigned to the devices round-robin. Raises UserError if the model cannot be served with
    this configuration."""
    placement, own_experts = None, model.num_experts
    roles: tuple[Role, ...] = (Role.ATTENTION, Role.EXPERT)
    cluster = start.cluster
    if cluster.expert_workers:
        ranks = [Rank(cluster.attention_workers + i) for i in range(cluster.expert_workers)]
        placement = place_experts(model.num_experts, model.moe_layers, ranks, cluster.shadow_experts)
        roles, own_experts = (Role.ATTENTION,), 0
    kinds: Sequence[tuple[tuple[Role, ...], int]] = [
        *((roles, own_experts) for _ in range(cluster.attention_workers)),
        *(((Role.EXPERT,), 0) for _ in range(cluster.expert_workers)),
    ]
    seats = tuple(
        SeatGoal(
            rank=Rank(rank),
            roles=roles,
            own_experts=own_experts,
            device=rank % start.num_devices if start.num_devices else NO_DEVICE,
        )
        for rank, (roles, own_experts) in enumerate(kinds)
    )
    return Goal(version=1, seats=seats, placement=placement)


def capacity_of(start: StartOrchestrator, model: ModelConfig, goal: Goal) -> Capacity:
    """For the first goal and every later one."""
    slots_per_layer = goal.placement.num_slots if goal.placement is not None else 0
    log_bytes, kv_bytes = _log_bytes(model, start.worker)
    return Capacity(
        max_workers=1 + max(seat.rank for seat in goal.seats),
        slots_per_layer=slots_per_layer,
        lane_bytes=_lane_bytes(model, start.worker, slots_per_layer),
        log_bytes=log_bytes,
        kv_bytes=kv_bytes,
    )


def _lane_bytes(model: ModelConfig, settings: WorkerSettings, num_slots: int) -> int:
    """The size of one lane, in the memory of the device that the workers compute on."""
    if settings.compute.device == "cuda":
        from everserve.backends.cuda.lanes.lane import CudaLaneShape  # noqa: PLC0415 (only here, and it needs torch)

        top_k = max(model.experts_per_token, 1)
        shape = CudaLaneShape(settings.engine.max_num_batched_tokens, top_k, model.hidden_size, max(num_slots, 1))
        return shape.lane_bytes()
    return LaneShape.of(model, settings.engine.max_num_batched_tokens).lane_bytes()


def _log_bytes(model: ModelConfig, settings: WorkerSettings) -> tuple[int, int]:
    """The size of each log: in host memory, and in device memory where its blocks are the KV cache itself."""
    if settings.log.mode == "off":
        return 0, 0
    shape = KvSizes.of(model, settings.engine, settings.model.dtype).log
    if settings.compute.device == "cuda" and settings.log.mode == "anchor":
        return shape.head_bytes, shape.num_blocks * shape.block_bytes
    return shape.num_bytes, 0


def describe(placement: Placement) -> PlacementMade:
    """Log how many deaths the placement survives, and return the same as an event."""
    deaths = survivable_deaths(placement)
    num_active = max(len(experts) for seat in placement.seats for experts in seat.active)
    num_shadow = max(len(experts) for seat in placement.seats for experts in seat.shadows)
    log.info(
        "%d expert workers with %d active and %d shadow experts per layer each: %s",
        len(placement.seats), num_active, num_shadow,
        f"any {deaths} may die at once without a pause" if deaths else "every death makes streams wait",
    )  # fmt: skip
    return PlacementMade(
        process="orchestrator",
        num_expert_workers=len(placement.seats),
        active_per_worker=num_active,
        shadow_per_worker=num_shadow,
        survivable_deaths=deaths,
    )
