"""From what the command line says to what an instance is started with, and what is refused before that."""

import os
import sys
from pathlib import Path

from msgspec import structs

from everserve.backends.cpu import lane
from everserve.cli.devices import Chosen, dtype_on, kv_cache_bytes
from everserve.cli.flags import Said
from everserve.config.cluster import ClusterConfig
from everserve.config.compute import ComputeConfig
from everserve.config.engine import EngineConfig
from everserve.config.kvlog import LogConfig
from everserve.config.model import ModelSource
from everserve.control.design import capacity_of, first_goal, place
from everserve.control.needs import Needs
from everserve.errors import ConfigError
from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.native import BuildError
from everserve.plan.head_memory import can_divide_heads
from everserve.plan.steps import step_tokens
from everserve.tables.ids import NO_DEVICE, Incarnation, Rank, WorkerId
from everserve.tables.memory import Kind
from everserve.wire.messages import StartOrchestrator, WorkerSettings

DIVIDES_HEADS_ON_GPU = True  # by default, where a model's heads can be divided
HEADS_HAVE_LOGS_ON_GPU = True  # else KV of divided heads is computed again wherever it would be fetched there
_CPU_MEMORY_SHARE = 0.25  # of what is free, for KV: default of --gpu-memory-utilization on a CPU


def resolve_model(model: str) -> Path:
    """The directory behind a MODEL argument."""
    directory = DEMO_MODEL if model == "demo" else Path(model)
    if not directory.is_dir():
        raise ConfigError(
            f"{model} is not a directory: give the path of a downloaded Hugging Face model, or `demo` for the bundled"
            " one"
        )
    return directory.resolve()


def check_experts(cluster: ClusterConfig, model: ModelConfig) -> None:
    """Say here what the orchestrator would only find out later: can these workers have this model's experts?"""
    if not cluster.expert_workers:
        if cluster.shadow_experts:
            raise ConfigError("--shadow-experts needs --expert-workers: without them every worker has all experts")
        if cluster.shadow_shards:
            raise ConfigError("--shadow-shards needs -tp 2 or more: on one device there is no further place")
        return
    ranks = [Rank(cluster.attention_workers + i) for i in range(cluster.expert_workers)]
    place(model, ranks, cluster.shadow_experts, cluster.shadow_shards)


def check_weights(cluster: ClusterConfig, source: ModelSource) -> None:
    """These flags are about experts of expert workers."""
    if not cluster.expert_workers and source.weights == "memory":
        raise ConfigError("--weights memory needs --expert-workers")
    if not cluster.expert_workers and source.expert_backup != "off":
        raise ConfigError(f"--expert-backup {source.expert_backup} needs --expert-workers")
    if not cluster.expert_workers and cluster.map_experts == "on":
        raise ConfigError("--map-experts on needs --expert-workers")


def check_compiler() -> None:
    """Compile now what every process would compile first."""
    try:
        lane.load()
    except BuildError as error:
        raise ConfigError(f"everserve compiles a little C when it first runs, and cannot: {error}") from error


def worker_settings(
    source: ModelSource,
    engine: Said[EngineConfig],
    kv_log: Said[LogConfig],
    compute: Said[ComputeConfig],
    event_log: str | None,
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
    """With tensor parallelism heads and their KV are divided too: on CPUs always, on a GPU if they can be, unless that
    was turned off."""
    source, log, is_gpu = settings.model, settings.log, settings.compute.device == "cuda"
    if source.divide_heads and not source.tensor_parallel:
        raise ConfigError("--divide-heads needs --tensor-parallel-size")
    if source.divide_heads is False and source.tensor_parallel and not is_gpu:
        raise ConfigError("--no-divide-heads: on CPUs --tensor-parallel-size always divides heads")
    is_divided = source.tensor_parallel and bool(cluster.expert_workers)
    if log.shadow is not None and not (is_divided and not is_gpu):
        raise ConfigError(
            f"--kv-shadow {log.shadow} needs -tp 2 or more on CPUs: elsewhere a stream's KV is in one"
            " worker, and --kv-log says where it outlives it"
        )
    if is_gpu:
        asked = DIVIDES_HEADS_ON_GPU if source.divide_heads is None else source.divide_heads
        obstacle = whole_heads(settings) if asked else None
        if obstacle is not None and source.divide_heads:
            raise ConfigError(f"--divide-heads: {obstacle}")
        wanted = source.tensor_parallel and asked and obstacle is None
        source = structs.replace(source, divide_heads=wanted)  # one process has the same bits
        is_divided = is_divided and wanted
        log = log if HEADS_HAVE_LOGS_ON_GPU or not is_divided else structs.replace(log, mode="off")
    elif is_divided and source.weights != "mapped":
        raise ConfigError("--tensor-parallel-size: on CPUs only with --weights mapped")
    return structs.replace(settings, model=structs.replace(source, divides_heads=is_divided), log=log)


def whole_heads(settings: WorkerSettings) -> str | None:
    """Why tensor parallelism on a GPU leaves attention at home, if it has to."""
    if not can_divide_heads(ModelConfig.from_source(settings.model)):
        return "this model's heads can only be divided on CPUs"
    return None


def say_whole_heads(said: WorkerSettings, used: WorkerSettings) -> None:
    """That heads are not divided, though nothing was said against it."""
    is_left_out = said.model.divide_heads is None and DIVIDES_HEADS_ON_GPU and not used.model.divide_heads
    if used.compute.device == "cuda" and used.model.tensor_parallel and is_left_out:
        print(f"everserve: attention is not divided: {whole_heads(said)}", file=sys.stderr, flush=True)


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
    """With the KV cache as large as it was wanted, or as these devices have room for it."""
    if cluster.map_experts == "on" and worker.model.weights != "memory":
        raise ConfigError("--map-experts on: on CPUs only with --weights memory")
    gpus = tuple(device.uuid for device in chosen.devices)
    start = StartOrchestrator(cluster=cluster, worker=worker, num_gpus=len(gpus), gpus=gpus)
    expert_bytes = _expert_bytes(start)
    if expert_bytes > _available_bytes():
        raise ConfigError(
            f"experts in host memory take {expert_bytes / 1e9:.1f} GB, and {_available_bytes() / 1e9:.1f} GB are there:"
            " use --weights mapped or --expert-backup off, or fewer --shadow-experts"
        )
    if worker.engine.kv_cache_bytes:
        return start
    if chosen.device == "cpu":
        most = cluster.attention_workers + cluster.num_growth
        kv_bytes = _free_bytes_for_kv(utilization, expert_bytes, most, _copies_of_kv(worker, cluster))
    else:
        kv_bytes = kv_cache_bytes(chosen, start, utilization, cluster.spares)
    engine = structs.replace(worker.engine, kv_cache_bytes=kv_bytes)
    return structs.replace(start, worker=structs.replace(worker, engine=engine))


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


def _available_bytes() -> int:
    """Memory of the host that is free, or that the kernel would free: it holds cached files."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _copies_of_kv(worker: WorkerSettings, cluster: ClusterConfig) -> float:
    """Besides KV itself. A parity covers one device less than there are."""
    if not worker.model.divides_heads:
        return 1.0 if worker.log.mode == "mirror" else 0.0
    return {"off": 0.0, "mirror": 1.0, "parity": 1 / (cluster.attention_workers - 1)}[worker.log.kv_shadow]


def _free_bytes_for_kv(share: float | None, expert_bytes: int, num_attention: int, num_copies: float) -> int:
    """What is free now and not needed for experts, shared by the attention workers."""
    free = max(0, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - expert_bytes)
    return int(free * (share or _CPU_MEMORY_SHARE) / num_attention / (1 + num_copies))
