"""What workers are told in tests."""

from msgspec import structs

from everserve.config.compute import ComputeConfig
from everserve.config.engine import EngineConfig
from everserve.config.kvlog import LogConfig
from everserve.config.model import ModelSource
from everserve.wire.messages import WorkerSettings

SMALL = WorkerSettings(
    model=ModelSource(directory="a model"),
    engine=EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_prefill_while_decoding=64,
        max_prefill_slowdown=0.0,
        block_size=16,
        kv_cache_bytes=1 << 24,
    ),
    log=LogConfig(mode="off"),
    compute=ComputeConfig(device="cpu", num_threads=1),
)


def worker_settings(**changes: object) -> WorkerSettings:
    """Small ones, but for these fields of their configs."""
    for name in ("model", "engine", "log", "compute"):
        config = getattr(SMALL, name)
        changes[name] = structs.replace(config, **{f: changes.pop(f) for f in config.__struct_fields__ if f in changes})
    return WorkerSettings(**changes)  # type: ignore[arg-type]
