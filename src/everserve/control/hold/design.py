"""What an instance starts with: the capacity that it allocates once, and the first goal."""

import logging
from collections.abc import Sequence

import msgspec

from everserve.backends.cpu.lane import LaneShape
from everserve.config.cluster import ClusterConfig
from everserve.engine.sizing import KvSizes
from everserve.model.config import ModelConfig
from everserve.plan.lost_experts import LostExpertPolicy
from everserve.plan.placement import place_experts, survivable_deaths, survivable_losses
from everserve.plan.repair import Room, replan
from everserve.plan.shards import Spread, place_shards
from everserve.plan.survival import repairable_devices
from everserve.tables.calls import ShardKind
from everserve.tables.goal import Capacity, Goal, SeatGoal
from everserve.tables.ids import NO_DEVICE, Rank, Role
from everserve.tables.placement import Placement
from everserve.wire.events import PlacementMade
from everserve.wire.messages import StartOrchestrator, WorkerSettings
from everserve.words import any_of, count, size

log = logging.getLogger(__name__)

_ITEM_BYTES = 2  # of a weight
_FILL_BYTES = 1 << 30  # of one message: some 20 ms of copying between host and device
_FEWEST_FILLS, _MOST_FILLS = 4, 128
_MAP_BY_DEFAULT = {"cpu": "on", "cuda": "on"}  # what --map-experts auto means, where there is memory to map


def first_goal(start: StartOrchestrator, model: ModelConfig) -> Goal:
    """The configured workers, dealt to the devices in order. Raises UserError if the model cannot be served with this
    configuration."""
    cluster = start.cluster
    roles: tuple[Role, ...] = (Role.ATTENTION,) if cluster.expert_workers else (Role.ATTENTION, Role.EXPERT)
    own_experts = 0 if cluster.expert_workers else model.num_experts
    kinds = [(roles, own_experts)] * cluster.attention_workers + [((Role.EXPERT,), 0)] * cluster.expert_workers
    num_devices = cluster.devices or start.num_gpus or len(kinds)
    seats = tuple(
        SeatGoal(
            rank=Rank(rank),
            roles=roles,
            host=rank % num_devices % cluster.hosts,
            own_experts=own_experts,
            device=rank % num_devices,
            gpu=rank % num_devices % start.num_gpus if start.num_gpus else NO_DEVICE,
        )
        for rank, (roles, own_experts) in enumerate(kinds)
    )
    experts = [seat for seat in seats if Role.ATTENTION not in seat.roles]
    placement = _first_placement(model, experts, start) if experts else None
    return Goal(version=1, seats=seats, placement=placement)


def _first_placement(model: ModelConfig, seats: Sequence[SeatGoal], start: StartOrchestrator) -> Placement:
    """The planner of every later change has the last word: it knows of devices, and what it finds good it keeps."""
    cluster = start.cluster
    placement = place(model, [seat.rank for seat in seats], cluster.shadow_experts, cluster.shadow_shards or 0)
    slots = _slots(placement, start)
    has_pieces = start.num_gpus and any(call.kind is ShardKind.HEAD for call in placement.calls)
    pieces = _head_pieces(placement, start) if has_pieces else 0
    return replan(placement, [Room(seat.rank, seat.device, max(slots), slots, pieces) for seat in seats])


def place(model: ModelConfig, ranks: Sequence[Rank], num_shadows: int | None, num_copies: int = 0) -> Placement:
    """Whole experts in even shares. What every row needs, and experts of which there are few, in a way that leaves all
    workers the same work, however many they are; without copies, if there shall be none: then remainders are dealt
    where there are slots for that anyway. `num_copies`: further places that all of these have at least."""
    if model.moe_layers and not model.tensor_parallel:
        return place_experts(model.num_experts, model.moe_layers, ranks, num_shadows)
    spread = Spread.CYCLIC if num_shadows == 0 else Spread.DEALT
    placement = place_shards(model.calls, ranks, num_shadows, spread, num_copies)
    return msgspec.structs.replace(placement, deals_remainder=True)


def _slots(placement: Placement, start: StartOrchestrator) -> tuple[int, ...]:
    """The slots of every expert worker in each call; calls of the same kind and width have the same number."""
    most: dict[tuple[ShardKind, int], int] = {}
    alike = [(call.kind, call.num_shards) for call in placement.calls]
    for key, num in zip(alike, placement.slots_by_call, strict=True):
        spare = _spare_heads(start) if key[0] is ShardKind.HEAD else 0
        num_slots = key[1] if spare is None else max(num + spare, _share(key[1], placement, start))
        if (
            key[0] is ShardKind.HEAD and start.cluster.max_lost_devices
        ):  # a piece that is left takes a head of any layer
            num_slots = max(num_slots, -(-key[1] // len(placement.seats)) + 1)
        most[key] = max(most.get(key, 0), min(num_slots, key[1]))
    return tuple(most[key] for key in alike)


def _spare_heads(start: StartOrchestrator) -> int | None:
    """Slots for heads that an expert worker has more than heads, in each layer; None: it has one for every head. So any
    worker can take over any: a slot without a head costs next to nothing, its KV is memory that is only paid for where
    it is used. Not so on a GPU: there they are as many as shadows, if these were asked for."""
    return (start.cluster.shadow_experts or 0) if start.num_gpus else None


def _share(num_shards: int, placement: Placement, start: StartOrchestrator) -> int:
    """The share of each worker, when as many are lost as there should be room for."""
    return -(-num_shards // (len(placement.seats) - (start.cluster.max_lost_devices or 0)))


def capacity_of(start: StartOrchestrator, model: ModelConfig, goal: Goal) -> Capacity:
    """The capacity for the first goal and every later one."""
    slots = _slots(goal.placement, start) if goal.placement is not None else ()
    slots_per_layer = max(slots, default=0)
    log_bytes, kv_bytes = _log_bytes(model, start.worker, start.cluster.devices)
    mapped_slots, is_off = _mapped_slots(start, model, goal, slots), start.worker.log.mode == "off"
    has_room = start.cluster.shadow_experts or start.cluster.max_lost_devices
    return Capacity(
        max_workers=max(start.cluster.max_workers or 0, 1 + max(seat.rank for seat in goal.seats)),
        num_gpus=start.num_gpus,
        devices=start.cluster.devices,
        slots_per_layer=slots_per_layer,
        slots_by_call=slots if len(set(slots)) > 1 else (),
        mapped_slots=mapped_slots,
        head_pieces=_head_pieces(goal.placement, start) if start.num_gpus and model.divides_heads else 0,
        heads_stay=bool(start.num_gpus and model.divides_heads) and (is_off or not has_room),
        lane_bytes=_lane_bytes(model, start.worker, slots_per_layer + mapped_slots),
        log_bytes=log_bytes,
        kv_bytes=kv_bytes,
    )


def _head_pieces(placement: Placement | None, start: StartOrchestrator) -> int:
    """What is lost is dealt so that all have as many, in all layers together (plan/dealing.py)."""
    assert placement is not None, "divided heads have places"
    heads = [index for index, call in enumerate(placement.calls) if call.kind is ShardKind.HEAD]
    most = max(sum(len(seat.experts(index)) for index in heads) for seat in placement.seats)
    spare, num_heads = _spare_heads(start) or 0, sum(placement.calls[index].num_shards for index in heads)
    return max(min(most + spare * len(heads), num_heads), _share(num_heads, placement, start))


def _mapped_slots(start: StartOrchestrator, model: ModelConfig, goal: Goal, slots: Sequence[int]) -> int:
    """Every expert worker's further slots for experts in the memory of others (plan/mapping.py): as many as it has
    with memory, so that half of the workers can stand in for the other half, but not more than there are experts."""
    device, wanted = start.worker.compute.device, start.cluster.map_experts
    is_memory = device == "cuda" or start.worker.model.weights == "memory"
    if (_MAP_BY_DEFAULT[device] if wanted == "auto" else wanted) == "off":
        return 0
    experts = [seat.gpu for seat in goal.seats if Role.ATTENTION not in seat.roles]
    are_together = len(set(experts)) < len(experts) or (start.cluster.max_workers or 0) > len(goal.seats)
    if not is_memory or not are_together or model.divides_heads or not slots:
        return 0
    widths = (call.num_shards for call in model.calls)
    return max(0, *(min(num, width - num) for num, width in zip(slots, widths, strict=True)))


def lost_expert_policy(cluster: ClusterConfig, model: ModelConfig) -> LostExpertPolicy:
    """Only whole experts can be left out by a router: a model that is divided further waits for what it has lost."""
    is_divided = any(call.kind is not ShardKind.EXPERT for call in model.calls) or model.tensor_parallel
    return LostExpertPolicy.of(
        "wait" if is_divided else cluster.on_lost_expert,
        cluster.max_masked_experts,
        model.num_experts,
        model.experts_per_token,
    )


def max_fills(model: ModelConfig) -> int:
    """In one message to a worker. What it was told is not taken back, so a message should not take long."""
    expert_bytes = max(cut.num_weights(model.hidden_size) for cut in model.cuts) * _ITEM_BYTES
    return max(_FEWEST_FILLS, min(_MOST_FILLS, _FILL_BYTES // max(expert_bytes, 1)))


def _lane_bytes(model: ModelConfig, settings: WorkerSettings, num_slots: int) -> int:
    """The size of one lane, in the memory of the device that the workers compute on."""
    if settings.compute.device == "cuda":
        from everserve.backends.cuda.lanes.page import lane_shape  # noqa: PLC0415 (only here)

        return lane_shape(model, settings.engine, num_slots).lane_bytes()
    return LaneShape.for_engine(model, settings.engine).lane_bytes()


def _log_bytes(model: ModelConfig, settings: WorkerSettings, num_devices: int | None) -> tuple[int, int]:
    """The size of each log: in host memory, and in device memory where its blocks are the KV cache itself. Where heads
    are divided, a log has records only."""
    if settings.log.mode == "off":
        return 0, 0
    sizes = KvSizes.of(model, settings.engine, settings.model.dtype)
    if model.divides_heads:
        assert num_devices is not None, "divided heads have devices"
        return sizes.records(num_devices).head_bytes, 0
    shape = sizes.log
    if settings.compute.device == "cuda" and settings.log.mode == "anchor":
        return shape.head_bytes, shape.num_blocks * shape.block_bytes
    return shape.num_bytes, 0


def describe(goal: Goal, placement: Placement, capacity: Capacity) -> PlacementMade:
    """Log which losses the placement survives, and return the same as an event."""
    device_of = {seat.rank: seat.device for seat in goal.seats}
    deaths, losses = survivable_deaths(placement), survivable_losses(placement, device_of)
    devices = {device_of[seat.rank] for seat in placement.seats}
    repairable = repairable_devices(goal, placement, capacity)
    num_active = max(len(experts) for seat in placement.seats for experts in seat.active)
    num_shadow = max(len(experts) for seat in placement.seats for experts in seat.shadows)
    per_layer = f"{num_active} active and {count(num_shadow, 'shadow expert')} per layer"
    log.info("%s; each worker has %s", size(0, len(placement.seats), len(devices)), per_layer)
    log.info(
        "survived without a pause: the death of %s, or the loss of %s; with a repair: the loss of %s",
        any_of(deaths, "expert worker"), any_of(losses, "device"), any_of(max(repairable, losses), "device"),
    )  # fmt: skip
    return PlacementMade(
        num_expert_workers=len(placement.seats),
        active_per_worker=num_active,
        shadow_per_worker=num_shadow,
        survivable_deaths=deaths,
        survivable_devices=losses,
        repairable_devices=max(repairable, losses),
    )
