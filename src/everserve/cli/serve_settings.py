"""From what the command line says to what an instance is started with, and what is refused before that."""

import os
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
from everserve.errors import ConfigError
from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.native import BuildError
from everserve.plan.placement import place_experts
from everserve.tables.ids import Rank
from everserve.wire.messages import StartOrchestrator, WorkerSettings

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
        return
    if not model.moe_layers:
        raise ConfigError("--expert-workers: this model has no experts; leave the flag out")
    ranks = [Rank(cluster.attention_workers + i) for i in range(cluster.expert_workers)]
    place_experts(model.num_experts, model.moe_layers, ranks, cluster.shadow_experts)


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
) -> WorkerSettings:
    """What was said, and the defaults of this kind of device. The KV cache has no size yet, unless that was said."""
    if source.load_format == "dummy" and device == "cpu":
        raise ConfigError("--load-format dummy: only on a GPU")
    return WorkerSettings(
        model=structs.replace(source, dtype=dtype_on(device, source.dtype)),
        engine=engine.make(device, kv_cache_bytes=0),
        log=kv_log.make(device),
        compute=structs.replace(compute.make(), device=device),
        event_log=event_log,
    )


def start_orchestrator(
    cluster: ClusterConfig, worker: WorkerSettings, chosen: Chosen, utilization: float | None
) -> StartOrchestrator:
    """With the KV cache as large as it was wanted, or as these devices have room for it."""
    start = StartOrchestrator(cluster=cluster, worker=worker, num_devices=len(chosen.devices))
    if worker.engine.kv_cache_bytes:
        return start
    if chosen.device == "cpu":
        kv_bytes = _free_bytes_for_kv(utilization, cluster.attention_workers, has_mirror=worker.log.mode == "mirror")
    else:
        kv_bytes = kv_cache_bytes(chosen, start, utilization, cluster.spares)
    engine = structs.replace(worker.engine, kv_cache_bytes=kv_bytes)
    return structs.replace(start, worker=structs.replace(worker, engine=engine))


def _free_bytes_for_kv(share: float | None, num_attention: int, has_mirror: bool) -> int:
    """What is free now, shared by the attention workers; a mirror costs as much again."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(free * (share or _CPU_MEMORY_SHARE) / num_attention / (2 if has_mirror else 1))
