"""From the flags of `everserve serve` to what its processes are told.

    flags -> check_values, check_model, check_compiler -> (devices are chosen)
          -> orchestrator_settings, gateway_settings

What cannot be served is refused here, before anything starts.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from everserve.backends.cpu import lane
from everserve.cli.devices import Chosen, dtype_on, kv_cache_bytes
from everserve.cli.files import check_directory, read_text
from everserve.errors import ConfigError
from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.model.fingerprint import fingerprint
from everserve.native import BuildError
from everserve.plan.placement import place_experts
from everserve.tables.ids import Rank
from everserve.wire.messages import StartGateway, StartOrchestrator, WorkerSettings

_MIN_DETECT_MS, _MAX_DETECT_MS = 20, 60_000  # below that, busy machines make live workers look dead
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_KV_LOGS = ("mirror", "anchor", "off")
_BLOCK_SIZES = {"cpu": 16, "cuda": 64}  # tokens; a GPU reads larger pieces, and has more of them to count
_NUM_SEQS = {"cpu": 128, "cuda": 256}
_BATCHED_TOKENS = {"cpu": 512, "cuda": 2048}
_PREFILL_WHILE_DECODING = {"cpu": 64, "cuda": 512}
_KV_LOG = {"cpu": "mirror", "cuda": "anchor"}  # the way from a device to the memory of its host is long
_CPU_MEMORY_SHARE = 0.25  # of what is free, for KV: default of --gpu-memory-utilization on a CPU


@dataclass(frozen=True, kw_only=True)
class Flags:
    """All options of `everserve serve`, by their names; what they mean is said there."""

    model: str
    config: Path | None  # its values are among the others
    host: str
    port: int
    served_model_name: list[str] | None
    api_key: list[str] | None
    admin_key: str | None
    allowed_hosts: list[str] | None
    attention_workers: int
    expert_workers: int
    shadow_experts: int | None
    spares: int
    detect_ms: float
    dtype: str
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_prefill_while_decoding: int | None
    max_queue: int
    block_size: int | None
    load_format: str
    device: str
    share_device: bool | None
    gpu_memory_utilization: float | None
    kv_cache_memory_bytes: int | None
    kv_log: str | None
    enable_prefix_caching: bool
    batch_invariant: bool
    threads: int | None
    seed: int | None
    max_logprobs: int
    chat_template: Path | None
    shutdown_timeout: float
    resume_window: float
    resume_memory_bytes: int
    enable_chaos: bool
    event_log: Path | None
    otlp_traces_endpoint: str | None


def check_values(flags: Flags) -> None:
    """What is wrong whatever the model is."""
    if flags.detect_ms and not _MIN_DETECT_MS <= flags.detect_ms <= _MAX_DETECT_MS:
        raise ConfigError(f"--detect-ms {flags.detect_ms:g}: choose 0 or {_MIN_DETECT_MS} to {_MAX_DETECT_MS}")
    if flags.dtype not in _DTYPES:
        raise ConfigError(f"--dtype {flags.dtype}: choose one of {', '.join(_DTYPES)}")
    if flags.kv_log not in (None, *_KV_LOGS):
        raise ConfigError(f"--kv-log {flags.kv_log}: choose one of {', '.join(_KV_LOGS)}")
    if flags.block_size not in (None, 16, 32, 64, 128):
        raise ConfigError(f"--block-size {flags.block_size}: choose 16, 32, 64 or 128")
    if flags.load_format not in ("auto", "dummy"):
        raise ConfigError(f"--load-format {flags.load_format}: choose auto or dummy")
    if flags.gpu_memory_utilization is not None and not 0 < flags.gpu_memory_utilization <= 1:
        raise ConfigError("--gpu-memory-utilization must be above 0 and at most 1")
    if not all(flags.api_key or ["-"]):
        raise ConfigError("--api-key is empty: leave it out if everybody may ask")
    if flags.admin_key is not None and not flags.admin_key.strip():
        raise ConfigError("--admin-key is empty: leave it out if there is none")
    if flags.admin_key in (flags.api_key or []):
        raise ConfigError("--admin-key is an --api-key too: every client could change the cluster")
    if not all(flags.served_model_name or ["-"]):
        raise ConfigError("--served-model-name is empty")
    if flags.event_log is not None:
        check_directory(flags.event_log, "--event-log", mode=0o700)


def resolve_model(model: str) -> Path:
    """The directory behind a MODEL argument."""
    directory = DEMO_MODEL if model == "demo" else Path(model)
    if not directory.is_dir():
        raise ConfigError(
            f"{model} is not a directory: give the path of a downloaded Hugging Face model, or `demo` for the bundled"
            " one"
        )
    return directory.resolve()


def check_model(flags: Flags, model: ModelConfig) -> None:
    """Say here what the orchestrator would only find out later: can these workers have this model's experts?"""
    if not flags.expert_workers:
        if flags.shadow_experts:
            raise ConfigError("--shadow-experts needs --expert-workers: without them every worker has all experts")
        return
    if not model.moe_layers:
        raise ConfigError("--expert-workers: this model has no experts; leave the flag out")
    ranks = [Rank(flags.attention_workers + i) for i in range(flags.expert_workers)]
    place_experts(model.num_experts, model.moe_layers, ranks, flags.shadow_experts)


def check_compiler() -> None:
    """Compile now what every process would compile first."""
    try:
        lane.load()
    except BuildError as error:
        raise ConfigError(f"everserve compiles a little C when it first runs, and cannot: {error}") from error


def orchestrator_settings(flags: Flags, directory: Path, model: ModelConfig, chosen: Chosen) -> StartOrchestrator:
    """With the KV cache as large as the flags want it, or as these devices have room for it."""
    if flags.load_format == "dummy" and chosen.device == "cpu":
        raise ConfigError("--load-format dummy: only on a GPU")
    start = StartOrchestrator(
        model=str(directory),
        num_attention=flags.attention_workers,
        num_expert=flags.expert_workers,
        shadow_experts=flags.shadow_experts,
        detect_ms=flags.detect_ms,
        worker=_worker_settings(flags, directory, chosen.device),
        event_log=_text(flags.event_log),
        num_devices=len(chosen.devices),
    )
    if flags.kv_cache_memory_bytes is not None:
        return start
    if chosen.device == "cpu":
        share = flags.gpu_memory_utilization or _CPU_MEMORY_SHARE
        kv_bytes = _kv_cache_bytes(share, flags.attention_workers, has_mirror=start.worker.kv_log == "mirror")
    else:
        kv_bytes = kv_cache_bytes(chosen, start, flags.gpu_memory_utilization, flags.spares)
    return structs.replace(start, worker=structs.replace(start.worker, kv_cache_bytes=kv_bytes))


def _worker_settings(flags: Flags, directory: Path, device: str) -> WorkerSettings:
    return WorkerSettings(
        model=str(directory),
        dtype=dtype_on(device, flags.dtype),
        max_model_len=flags.max_model_len,
        max_num_seqs=flags.max_num_seqs or _NUM_SEQS[device],
        max_num_batched_tokens=flags.max_num_batched_tokens or _BATCHED_TOKENS[device],
        max_prefill_while_decoding=flags.max_prefill_while_decoding or _PREFILL_WHILE_DECODING[device],
        block_size=flags.block_size or _BLOCK_SIZES[device],
        kv_cache_bytes=flags.kv_cache_memory_bytes or 0,
        kv_log=flags.kv_log or _KV_LOG[device],
        enable_prefix_caching=flags.enable_prefix_caching,
        batch_invariant=flags.batch_invariant,
        num_threads=flags.threads,
        event_log=_text(flags.event_log),
        device=device,
        load_format=flags.load_format,
        fingerprint=fingerprint(directory),
    )


def gateway_settings(flags: Flags, directory: Path) -> StartGateway:
    return StartGateway(
        model=str(directory),
        served_model_names=flags.served_model_name or [flags.model],
        api_keys=flags.api_key or [],
        max_queue=flags.max_queue,
        shutdown_timeout_s=flags.shutdown_timeout,
        enable_chaos=flags.enable_chaos,
        seed=flags.seed,
        max_logprobs=flags.max_logprobs,
        chat_template=read_text(flags.chat_template, "--chat-template") if flags.chat_template is not None else None,
        event_log=_text(flags.event_log),
        resume_window_s=flags.resume_window,
        admin_key=flags.admin_key.strip() if flags.admin_key is not None else None,
        listen_host=flags.host,
        allowed_hosts=[flags.host, *_split(flags.allowed_hosts or [])],
        resume_memory_bytes=flags.resume_memory_bytes,
    )


def _kv_cache_bytes(share: float, num_attention: int, has_mirror: bool) -> int:
    """What is free now, shared by the attention workers; a mirror costs as much again."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(free * share / num_attention / (2 if has_mirror else 1))


def _split(names: list[str]) -> list[str]:
    """`--allowed-hosts a,b --allowed-hosts c`"""
    return [name.strip() for given in names for name in given.split(",") if name.strip()]


def _text(path: Path | None) -> str | None:
    return str(path.resolve()) if path is not None else None
