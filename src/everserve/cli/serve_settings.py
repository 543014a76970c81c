"""From what the command line says to what an instance is started with, and what is refused before that."""

import logging
import uuid

from msgspec import structs

from everserve.backends.cpu import lane
from everserve.carrier import key
from everserve.carrier.tls import listen
from everserve.cli.devices import Chosen, dtype_on, kv_cache_bytes
from everserve.cli.flags import Said
from everserve.config.cluster import ClusterConfig
from everserve.config.compute import ComputeConfig
from everserve.config.engine import EngineConfig
from everserve.config.events import EventLogConfig
from everserve.config.gateway import GatewayConfig
from everserve.config.kvlog import LogConfig
from everserve.config.launch import LaunchConfig
from everserve.config.model import ModelSource
from everserve.control.hold.design import capacity_of, first_goal, place
from everserve.control.hold.needs import Needs
from everserve.engine.sizing import KvSizes
from everserve.errors import ConfigError
from everserve.model.config import ModelConfig
from everserve.native import BuildError, best_level
from everserve.plan.head_memory import can_divide_heads
from everserve.plan.sizing import KvTooSmallError, mib
from everserve.plan.steps import step_tokens
from everserve.procs.host import available_bytes
from everserve.tables.ids import NO_DEVICE, Incarnation, Rank, WorkerId
from everserve.tables.memory import Kind
from everserve.wire.messages import StartCarrier, StartOrchestrator, WorkerSettings
from everserve.words import count

log = logging.getLogger(__name__)

_CPU_MEMORY_SHARE = 0.25  # of what is available, for KV: default of --gpu-memory-utilization on a CPU


def check_experts(cluster: ClusterConfig, model: ModelConfig) -> None:
    """Say here what the orchestrator would only find out later: can these workers have this model's experts?"""
    if not cluster.expert_workers:
        if cluster.shadow_experts:
            raise ConfigError("--shadow-experts needs --expert-workers: without them every worker has all experts")
        if cluster.shadow_shards:
            raise ConfigError("--shadow-shards needs -tp 2 or more: on one device there is no further place")
        return
    ranks = [Rank(cluster.attention_workers + i) for i in range(cluster.expert_workers)]
    place(model, ranks, cluster.shadow_experts, cluster.shadow_shards or 0)


def check_weights(cluster: ClusterConfig, source: ModelSource) -> None:
    """These flags are about experts of expert workers."""
    if not cluster.expert_workers and source.weights == "memory":
        raise ConfigError("--weights memory needs --expert-workers")
    if not cluster.expert_workers and source.expert_backup != "off":
        raise ConfigError(f"--expert-backup {source.expert_backup} needs --expert-workers")
    if not cluster.expert_workers and cluster.map_experts == "on":
        raise ConfigError("--map-experts on needs --expert-workers")


def check_libraries() -> None:
    """Compile now what every process would compile first, if the package has not brought it."""
    try:
        lane.load()
        level = best_level()
    except BuildError as error:
        raise ConfigError(f"everserve is partly C, which can be neither loaded nor compiled: {error}") from error
    if level.is_slow:
        log.warning("this CPU has no AVX2 (or its virtual machine hides it): the same tokens, many times slower")


def worker_settings(
    source: ModelSource,
    engine: Said[EngineConfig],
    kv_log: Said[LogConfig],
    compute: Said[ComputeConfig],
    event_log: EventLogConfig,
    device: str,
    has_experts: bool = False,
) -> WorkerSettings:
    """What was said, and the defaults of this kind of device. The KV cache has no size yet, unless that was said.
    `has_experts`: every worker has all experts."""
    if source.load_format == "dummy" and device == "cpu":
        raise ConfigError("--load-format dummy: only on a GPU")
    weights = source.weights if device == "cpu" else "memory"
    if source.expert_backup != "off" and weights != "memory":
        raise ConfigError("--expert-backup host: on CPUs only with --weights memory")
    return WorkerSettings(
        model=structs.replace(source, dtype=dtype_on(device, source.dtype), weights=weights),
        engine=engine.make(device, kv_cache_bytes=0, **_step_size(source, device, has_experts)),
        log=_log(kv_log, device),
        compute=structs.replace(compute.make(), device=device),
        event_log=event_log,
    )


def _step_size(source: ModelSource, device: str, has_experts: bool) -> dict[str, int]:
    if device == "cpu" or not has_experts:
        return {}
    return {"max_num_batched_tokens": step_tokens(ModelConfig.from_source(source))}


def _log(said: Said[LogConfig], device: str) -> LogConfig:
    """What was said of both must agree; what was not said follows."""
    found, shadow = said.make(device), said.values.get("shadow")
    if said.values.get("mode") == "mirror" and shadow not in (None, "mirror"):
        raise ConfigError(f"--kv-log mirror with --kv-shadow {shadow}: that mirror is the shadow, leave one out")
    return found


def divide_heads(settings: WorkerSettings, cluster: ClusterConfig) -> WorkerSettings:
    """With tensor parallelism heads and their KV are divided too, if the model's can be."""
    source, log, is_gpu = settings.model, settings.log, settings.compute.device == "cuda"
    can_be = source.tensor_parallel and whole_heads(settings) is None
    is_divided = can_be and bool(cluster.expert_workers)
    if log.shadow is not None and not (is_divided and not is_gpu):
        raise ConfigError(
            f"--kv-shadow {log.shadow} needs -tp 2 or more on CPUs: elsewhere a stream's KV is in one"
            " worker, and --kv-log says where it outlives it"
        )
    if is_divided and not is_gpu and source.weights != "mapped":
        raise ConfigError("--tensor-parallel-size: on CPUs only with --weights mapped")
    source = structs.replace(source, divide_heads=can_be and is_gpu, divides_heads=is_divided)
    return structs.replace(settings, model=source)


def whole_heads(settings: WorkerSettings) -> str | None:
    """Why tensor parallelism leaves attention at home, if it has to."""
    model = ModelConfig.from_source(settings.model)
    if can_divide_heads(model, settings.compute.device):
        return None
    if model.has_latent_attention:
        return "this model's heads share what is kept of a token"
    is_possible = model.has_heads_of_their_own
    return "this model's heads can only be divided on CPUs" if is_possible else "this model norms all heads together"


def say_whole_heads(settings: WorkerSettings) -> None:
    """Warn that heads are not divided where the rest of the model is."""
    if settings.model.tensor_parallel and (why := whole_heads(settings)) is not None:
        log.warning("attention is not divided: %s", why)


def with_room(cluster: ClusterConfig, settings: WorkerSettings) -> ClusterConfig:
    """Where heads are divided on a GPU, no shadows are made unless they were asked for: streams wait for the heads of a
    dead worker in any case. Instead the others have room for what it had."""
    is_divided, size = settings.model.divides_heads and settings.compute.device == "cuda", cluster.tensor_parallel_size
    if not is_divided or size is None:
        if cluster.max_lost_devices:
            raise ConfigError(
                f"--max-lost-devices {cluster.max_lost_devices} is for attention that is divided over GPUs: on CPUs the"
                " others always have room, and elsewhere --shadow-experts makes it"
            )
        return cluster
    default = 1 if size > 2 and cluster.shadow_experts is None else 0  # of two, each would have room for everything
    num_lost = default if cluster.max_lost_devices is None else cluster.max_lost_devices
    return structs.replace(cluster, shadow_experts=cluster.shadow_experts or 0, max_lost_devices=num_lost)


def start_orchestrator(
    cluster: ClusterConfig, worker: WorkerSettings, chosen: Chosen, utilization: float | None
) -> StartOrchestrator:
    """The orchestrator's start, with the KV cache as large as it was wanted, or as these devices have room for it."""
    if cluster.map_experts == "on" and worker.model.weights != "memory":
        raise ConfigError("--map-experts on: on CPUs only with --weights memory")
    gpus = tuple(device.uuid for device in chosen.devices)
    start = StartOrchestrator(cluster=cluster, worker=worker, num_gpus=len(gpus), gpus=gpus)
    expert_bytes, available = _expert_bytes(start), available_bytes()
    if expert_bytes > available:
        raise ConfigError(
            f"experts in host memory take {expert_bytes / 1e9:.1f} GB, and {available / 1e9:.1f} GB are there:"
            " use --weights mapped or --expert-backup off, or fewer --shadow-experts"
        )
    if worker.engine.kv_cache_bytes:
        return start
    if chosen.device == "cpu":
        share = utilization or _CPU_MEMORY_SHARE
        most, num_copies = cluster.attention_workers + cluster.num_growth, _copies_of_kv(worker, cluster)
        kv_bytes = int((available - expert_bytes) * share / most / (1 + num_copies))
        caches = count(most, "KV cache") + (" and their copies" if num_copies else "")
        why = f"{share:.0%} of the {mib(available)} that are available here goes to {caches}"
    else:
        kv_bytes = kv_cache_bytes(chosen, start, utilization, cluster.spares)
        why = "or --gpu-memory-utilization"
    engine = structs.replace(worker.engine, kv_cache_bytes=kv_bytes)
    _check_kv(worker.model, engine, why)
    return structs.replace(start, worker=structs.replace(worker, engine=engine))


def start_carrier(own: LaunchConfig, start: StartOrchestrator, gateway: GatewayConfig) -> StartCarrier | None:
    """What joins other hosts to this one; None: there are none."""
    cluster = start.cluster
    if cluster.hosts == 1:
        if own.cluster_key is not None:
            raise ConfigError("--cluster-key: for an instance of several --hosts")
        return None
    if start.num_gpus:
        raise ConfigError("--hosts: on CPUs only, yet; use --device cpu, or one instance for each host")
    if own.cluster_key is None:
        raise ConfigError("--hosts: say with --cluster-key where the file is that lets hosts in; it is made if needed")
    path = own.cluster_key.absolute()
    key.make_if_missing(path)
    key.context(path, is_server=True)
    listen(own.cluster_port).close()
    return StartCarrier(
        instance=uuid.uuid4().hex,
        port=own.cluster_port,
        key_file=str(path),
        num_hosts=cluster.hosts,
        num_gateways=gateway.gateways,
        device=start.worker.compute.device,
        detect_ms=cluster.detect_ms,
        grace_s=cluster.host_grace_s,
    )


def _check_kv(source: ModelSource, engine: EngineConfig, why: str) -> None:
    """Whether a KV cache of the size that we have chosen is of use. `why`: where that size comes from."""
    try:
        KvSizes.of(ModelConfig.from_source(source), engine, source.dtype)
    except KvTooSmallError as error:
        raise ConfigError(f"{error} ({why})") from error


def _expert_bytes(start: StartOrchestrator) -> int:
    """Host memory for experts: of expert workers on CPUs that do not map the files, and of the backup."""
    source = start.worker.model
    if not start.cluster.expert_workers or (source.weights, source.expert_backup) == ("mapped", "off"):
        return 0
    source = structs.replace(source, divides_heads=False)  # heads are not in host memory, and KV has no size yet
    worker = structs.replace(start.worker, model=source, log=LogConfig(mode="off"))
    start = structs.replace(start, worker=worker)
    model = ModelConfig.from_source(source)
    goal = first_goal(start, model)
    needs = Needs(model, start.worker, capacity_of(start, model, goal), start.cluster.detect_ms)
    pieces = {piece for seat in goal.seats for piece in needs.memory(goal, WorkerId(seat.rank, Incarnation(1)))}
    in_host = [piece for piece in pieces if piece.gpu == NO_DEVICE]
    return sum(piece.num_bytes for piece in in_host if piece.kind in (Kind.WEIGHTS, Kind.BACKUP))


def _copies_of_kv(worker: WorkerSettings, cluster: ClusterConfig) -> float:
    """Besides KV itself. A parity covers one device less than there are."""
    if not worker.model.divides_heads:
        return 1.0 if worker.log.mode == "mirror" else 0.0
    return {"off": 0.0, "mirror": 1.0, "parity": 1 / (cluster.attention_workers - 1)}[worker.log.kv_shadow]
