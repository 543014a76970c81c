"""`--survive-losses K`: any K workers, or devices, may be lost at once, and no stream waits for weights.

It stands for other flags, which say the same in detail and go first where they are given:

    expert workers without -tp    --shadow-experts     the fewest copies that leave every expert a place
    -tp                           --shadow-shards K    so many further places of every head, slice and expert
    -tp on GPUs                   --max-lost-devices K    and room, so that K more may be lost after that

Where every attention worker has all experts itself, nothing has to be set. What is kept of KV says --kv-log.
"""

from msgspec import structs

from everserve.config.cluster import ClusterConfig
from everserve.control.hold.design import first_goal
from everserve.errors import ConfigError
from everserve.model.config import ModelConfig
from everserve.plan.placement import survivable_losses
from everserve.wire.messages import StartOrchestrator, WorkerSettings
from everserve.words import count


def with_places(cluster: ClusterConfig, settings: WorkerSettings, num_gpus: int) -> ClusterConfig:
    """The same configuration with the flags that `--survive-losses` stands for. `settings`: how the model is cut."""
    num = cluster.survive_losses
    if num is None:
        return cluster
    _check_that_some_are_left(cluster, num, num_gpus)
    if not cluster.expert_workers:
        return cluster
    if cluster.tensor_parallel_size is not None:
        return _with_shards(cluster, num, has_room=settings.model.divides_heads and num_gpus > 0)
    if cluster.shadow_experts is not None:
        return cluster
    return structs.replace(cluster, shadow_experts=_fewest_shadows(cluster, settings, num_gpus, num))


def _check_that_some_are_left(cluster: ClusterConfig, num: int, num_gpus: int) -> None:
    num_devices = cluster.devices or num_gpus or cluster.num_workers
    homes = range(cluster.attention_workers)
    experts = range(cluster.attention_workers, cluster.num_workers)
    for name, ranks in (("attention", homes), ("expert", experts)):
        most = len({rank % num_devices for rank in ranks}) - 1
        if ranks and num > most:
            raise ConfigError(
                f"--survive-losses {num}: {name} workers are on {count(most + 1, 'device')}, so at most {most} can be"
                " lost without a wait"
            )


def _with_shards(cluster: ClusterConfig, num: int, *, has_room: bool) -> ClusterConfig:
    copies = num if cluster.shadow_shards is None else cluster.shadow_shards
    room = num if has_room and cluster.max_lost_devices is None else cluster.max_lost_devices
    return structs.replace(cluster, shadow_shards=copies, max_lost_devices=room)


def _fewest_shadows(cluster: ClusterConfig, settings: WorkerSettings, num_gpus: int, num: int) -> int:
    """The fewest for which the first placement leaves every expert a place, whichever devices are lost. Where a device
    has several expert workers, that may be more than a share of the experts for each loss."""
    model = ModelConfig.from_source(settings.model)
    widest = max(call.num_shards for call in model.calls)
    share, most = -(-widest // cluster.expert_workers), widest - widest // cluster.expert_workers
    tried: list[int] = [*range(num * share, most, max(share, 1)), most]
    for shadows in tried:
        trial = StartOrchestrator(
            cluster=structs.replace(cluster, shadow_experts=shadows), worker=settings, num_gpus=num_gpus
        )
        goal = first_goal(trial, model)
        assert goal.placement is not None, "there are expert workers"
        if survivable_losses(goal.placement, {seat.rank: seat.device for seat in goal.seats}) >= num:
            return shadows
    raise ConfigError(f"--survive-losses {num}: no number of shadow experts is enough on so few devices")
