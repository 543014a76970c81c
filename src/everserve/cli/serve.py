"""`everserve serve MODEL`: a whole instance under a supervisor, in the foreground."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml
from msgspec import structs

from everserve.cli import app
from everserve.cli.devices import choose, dtype_on, kv_cache_bytes
from everserve.cli.starting import FollowingBars
from everserve.datapath import lane
from everserve.errors import ConfigError
from everserve.gateway import tracing
from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.native import BuildError
from everserve.plan.placement import place_experts
from everserve.runtime.listening import listen_on, url_of
from everserve.runtime.messages import StartGateway, StartOrchestrator, WorkerSettings
from everserve.runtime.supervisor import Supervisor
from everserve.tables.ids import Rank

_MIN_DETECT_MS, _MAX_DETECT_MS = 20, 60_000  # below that, busy machines make live workers look dead
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_KV_LOGS = ("mirror", "anchor", "off")
_BLOCK_SIZES = {"cpu": 16, "cuda": 64}  # tokens; a GPU reads larger pieces, and has more of them to count
_NUM_SEQS = {"cpu": 128, "cuda": 256}
_BATCHED_TOKENS = {"cpu": 512, "cuda": 2048}
_PREFILL_WHILE_DECODING = {"cpu": 64, "cuda": 512}
_KV_LOG = {"cpu": "mirror", "cuda": "off"}  # on a GPU only tests without a GPU have seen a log so far
_CPU_MEMORY_SHARE = 0.25  # of what is free, for KV: default of --gpu-memory-utilization on a CPU


def _load_config(context: typer.Context, path: Path | None) -> Path | None:
    """`--config file.yaml`: keys are flags without dashes; the command line wins."""
    if path is None:
        return None
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected `flag: value` lines")
    known = {parameter.name for parameter in context.command.params if parameter.name}
    named = {str(key).lstrip("-").replace("-", "_"): value for key, value in values.items()}
    unknown = sorted(set(named) - known)
    if unknown:
        raise ConfigError(f"--config {path}: unknown flags {', '.join(unknown)}; see `everserve serve --help`")
    context.default_map = {**(context.default_map or {}), **named}
    return path


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A Hugging Face-format directory, or `demo` for the bundled model.")],
    config: Annotated[
        Path | None, typer.Option(help="YAML file of flags.", callback=_load_config, is_eager=True)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name in the API; may be given several times. Default: MODEL.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Accept only requests with one of these keys.", envvar="EVERSERVE_API_KEY")
    ] = None,
    attention_workers: Annotated[
        int, typer.Option(help="Workers that own requests and their KV cache.", min=1, max=32)
    ] = 1,
    expert_workers: Annotated[
        int,
        typer.Option(help="Workers that own experts. 0: each attention worker has all experts itself.", min=0, max=30),
    ] = 0,
    shadow_experts: Annotated[
        int | None,
        typer.Option(
            help="Inactive copies per expert worker and layer. Default: enough to survive the death of any one.", min=0
        ),
    ] = None,
    spares: Annotated[
        int,
        typer.Option(help="Processes per device that wait to become workers: replacements start sooner.", min=0, max=8),
    ] = 0,
    detect_ms: Annotated[
        float,
        typer.Option(
            help="A worker that shows no sign of life for this long counts as dead. 0: only those whose process ended."
        ),
    ] = 50.0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16: of weights and KV cache.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt plus output, in tokens. Default: the model's own.", min=1)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most streams in one step (default: 128 on a CPU, 256 on a GPU).", min=1)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Most tokens in one step (default: 512 on a CPU, 2048 on a GPU).", min=1)
    ] = None,
    max_prefill_while_decoding: Annotated[
        int | None,
        typer.Option(
            help="Most prompt tokens in one step in which other streams decode (default: 64 on a CPU, 512 on a GPU).",
            min=1,
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Most streams in flight, waiting ones included; beyond: 503.", min=1)
    ] = 1024,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per KV block: 16, 32, 64 or 128 (default: 16 on a CPU, 64 on a GPU).")
    ] = None,
    load_format: Annotated[
        str, typer.Option(help="auto: the model's files; dummy: random weights, from its config.json alone (GPU only).")
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="What workers compute on: cpu, cuda, or auto: cuda if there is a GPU.")
    ] = "auto",
    share_device: Annotated[
        bool | None,
        typer.Option(
            "--share-device/--no-share-device",
            help="Several workers on one GPU, through NVIDIA's MPS. Default: if there are more workers than GPUs.",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of a GPU's memory to use; the KV cache gets what weights and buffers leave (default 0.9)."
            " On a CPU: share of the free RAM for the KV cache (default 0.25)."
        ),
    ] = None,
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(help="Size of the KV cache; overrides --gpu-memory-utilization.", min=1)
    ] = None,
    kv_log: Annotated[
        str | None,
        typer.Option(
            help="Where KV outlives its worker. mirror: a copy; anchor: the cache itself is memory that survives;"
            " off: nowhere, streams of a dead worker are computed again. Default: mirror on a CPU, off on a GPU."
        ),
    ] = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV of equal prefixes.")] = True,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="A row's numbers never depend on the rest of the batch.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="Compute threads of a worker. Default: the cores, shared by the workers.", min=1)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of requests that bring none. Default: a random one each.", min=0)
    ] = None,
    max_logprobs: Annotated[int, typer.Option(help="Most alternatives per token.", min=0, max=20)] = 20,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file to use instead of the model's own template.")
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get to finish on SIGINT or SIGTERM.", min=0)
    ] = 30.0,
    resume_window: Annotated[
        float,
        typer.Option(help="Seconds for which a stream with an X-Request-Id waits for a client that broke off.", min=0),
    ] = 60.0,
    enable_chaos: Annotated[bool, typer.Option("--enable-chaos", help="Allow fault injection over HTTP.")] = False,
    fixed_routes: Annotated[
        bool, typer.Option("--fixed-routes", hidden=True, help="To measure what routes cost; no death is survived.")
    ] = False,
    pause_checkpoint_every: Annotated[
        int, typer.Option(hidden=True, min=0, help="To measure it: stop every N steps and copy all KV.")
    ] = 0,
    event_log: Annotated[Path | None, typer.Option(help="Directory for typed events, a file per process.")] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="Send a trace of each request there, as OTLP over HTTP: http://localhost:4318/v1/traces."),
    ] = None,
) -> None:
    """Serve a model over the OpenAI API."""
    if detect_ms and not _MIN_DETECT_MS <= detect_ms <= _MAX_DETECT_MS:
        raise ConfigError(f"--detect-ms {detect_ms:g}: choose 0 or {_MIN_DETECT_MS} to {_MAX_DETECT_MS}")
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype {dtype}: choose one of {', '.join(_DTYPES)}")
    if kv_log not in (None, *_KV_LOGS):
        raise ConfigError(f"--kv-log {kv_log}: choose one of {', '.join(_KV_LOGS)}")
    if block_size not in (None, 16, 32, 64, 128):
        raise ConfigError(f"--block-size {block_size}: choose 16, 32, 64 or 128")
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"--load-format {load_format}: choose auto or dummy")
    if gpu_memory_utilization is not None and not 0 < gpu_memory_utilization <= 1:
        raise ConfigError("--gpu-memory-utilization must be above 0 and at most 1")
    tracing.ask_for(otlp_traces_endpoint)
    directory = resolve_model(model)
    model_config = ModelConfig.from_directory(directory)  # what cannot be served is refused before anything starts
    if expert_workers:
        _check_experts(model_config, attention_workers, expert_workers, shadow_experts)
    elif shadow_experts:
        raise ConfigError("--shadow-experts needs --expert-workers: without them every worker has all experts")
    try:
        lane.load()
    except BuildError as error:
        raise ConfigError(f"everserve compiles a little C when it first runs, and cannot: {error}") from error
    chosen = choose(device, share_device, attention_workers + expert_workers)
    kv_log = kv_log or _KV_LOG[chosen.device]
    if load_format == "dummy" and chosen.device == "cpu":
        raise ConfigError("--load-format dummy: only on a GPU")
    if kv_cache_memory_bytes is None and chosen.device == "cpu":
        share = gpu_memory_utilization or _CPU_MEMORY_SHARE
        kv_cache_memory_bytes = _kv_cache_bytes(share, attention_workers, has_mirror=kv_log == "mirror")
    start = StartOrchestrator(
        model=str(directory),
        num_attention=attention_workers,
        num_expert=expert_workers,
        shadow_experts=shadow_experts,
        detect_ms=detect_ms,
        worker=WorkerSettings(
            model=str(directory),
            dtype=dtype_on(chosen.device, dtype),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs or _NUM_SEQS[chosen.device],
            max_num_batched_tokens=max_num_batched_tokens or _BATCHED_TOKENS[chosen.device],
            max_prefill_while_decoding=max_prefill_while_decoding or _PREFILL_WHILE_DECODING[chosen.device],
            block_size=block_size or _BLOCK_SIZES[chosen.device],
            kv_cache_bytes=kv_cache_memory_bytes or 0,
            kv_log=kv_log,
            enable_prefix_caching=enable_prefix_caching,
            batch_invariant=batch_invariant,
            num_threads=threads,
            fixed_routes=_fixed_routes(model_config, attention_workers, expert_workers) if fixed_routes else (0, 0),
            event_log=_text(event_log),
            pause_checkpoint_every=pause_checkpoint_every,
            device=chosen.device,
            load_format=load_format,
        ),
        event_log=_text(event_log),
        num_devices=len(chosen.devices),
    )
    if kv_cache_memory_bytes is None:
        kv_bytes = kv_cache_bytes(chosen, start, gpu_memory_utilization, spares)
        start = structs.replace(start, worker=structs.replace(start.worker, kv_cache_bytes=kv_bytes))
    listen = listen_on(host, port)
    bars = FollowingBars(url_of(listen), api_key or [], f"everserve: {model}")
    supervisor = Supervisor(
        listen,
        StartGateway(
            model=str(directory),
            served_model_names=served_model_name or [model],
            api_keys=api_key or [],
            max_queue=max_queue,
            shutdown_timeout_s=shutdown_timeout,
            enable_chaos=enable_chaos,
            seed=seed,
            max_logprobs=max_logprobs,
            chat_template=_read(chat_template),
            event_log=_text(event_log),
            resume_window_s=resume_window,
        ),
        start,
        grace_s=shutdown_timeout,
        event_log=_text(event_log),
        on_ready=lambda url: _say_ready(model, url, bars),
        share_device=chosen.share,
        num_spares=spares,
    )
    with bars:
        sys.exit(supervisor.run())


def _check_experts(model: ModelConfig, num_attention: int, num_expert: int, shadow_experts: int | None) -> None:
    """Say here what the orchestrator would only find out later."""
    if not model.moe_layers:
        raise ConfigError("--expert-workers: this model has no experts; leave the flag out")
    ranks = [Rank(num_attention + i) for i in range(num_expert)]
    place_experts(model.num_experts, model.moe_layers, ranks, shadow_experts)


def _kv_cache_bytes(share: float, num_attention: int, has_mirror: bool) -> int:
    """What is free now, shared by the attention workers; a mirror costs as much again."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(free * share / num_attention / (2 if has_mirror else 1))


def _fixed_routes(model: ModelConfig, num_attention: int, num_expert: int) -> tuple[int, int]:
    """(experts per worker, first expert rank): where the placement puts them as long as nobody dies."""
    if not num_expert or model.num_experts % num_expert:
        raise ConfigError("--fixed-routes needs --expert-workers that divide the number of experts")
    return model.num_experts // num_expert, num_attention


def resolve_model(model: str) -> Path:
    """The directory behind a MODEL argument."""
    directory = DEMO_MODEL if model == "demo" else Path(model)
    if not directory.is_dir():
        raise ConfigError(
            f"{model} is not a directory: give the path of a downloaded Hugging Face model, or `demo` for the bundled"
            " one"
        )
    return directory.resolve()


def _say_ready(model: str, url: str, bars: FollowingBars) -> None:
    bars.stop()
    print(f"everserve: {model} ready at {url}", file=sys.stderr, flush=True)


def _read(path: Path | None) -> str | None:
    try:
        return path.read_text() if path is not None else None
    except OSError as error:
        raise ConfigError(f"--chat-template {path}: {error.strerror}") from error


def _text(path: Path | None) -> str | None:
    return str(path.resolve()) if path is not None else None
