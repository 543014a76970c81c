"""`everserve serve MODEL`: a whole instance under a supervisor, in the foreground."""

import difflib
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml
from msgspec import structs

from everserve.cli import app
from everserve.cli.devices import choose
from everserve.cli.files import read_text
from everserve.cli.serve_settings import (
    Flags,
    check_compiler,
    check_model,
    check_values,
    gateway_settings,
    orchestrator_settings,
    resolve_model,
)
from everserve.cli.starting import FollowingBars
from everserve.errors import ConfigError
from everserve.gateway.observe import tracing
from everserve.model.config import ModelConfig
from everserve.procs.listening import listen_on, url_of
from everserve.procs.supervisor import Supervisor


def _load_config(context: typer.Context, path: Path | None) -> Path | None:
    """`--config file.yaml`: keys are flags without dashes; the command line wins."""
    if path is None:
        return None
    try:
        values = yaml.safe_load(read_text(path, "--config")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected `flag: value` lines")
    known = {parameter.name for parameter in context.command.params if parameter.name} - {"config"}
    names = {str(key): str(key).lstrip("-").replace("-", "_") for key in values}
    if unknown := [_suggest(key, name, known) for key, name in names.items() if name not in known]:
        raise ConfigError(f"--config {path}: unknown: {'; '.join(unknown)}; see `everserve serve --help`")
    named = dict(zip(names.values(), values.values(), strict=True))
    context.default_map = {**(context.default_map or {}), **named}
    return path


def _suggest(key: str, name: str, known: set[str]) -> str:
    """A key as the file has it, and the flag that it may have meant."""
    meant = difflib.get_close_matches(name, known, n=1)
    return f"{key} (did you mean {meant[0].replace('_', '-')}?)" if meant else key


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
        list[str] | None,
        typer.Option(
            help="Accept only requests with one of these keys. Keys on the command line are visible to every user of"
            " this host, in `ps`: better in EVERSERVE_API_KEY, separated by spaces.",
            envvar="EVERSERVE_API_KEY",
        ),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            help="What changes the cluster (kill, drain) needs this key, and is off without one if --host is not a"
            " loopback address. Visible in `ps`, too: better in EVERSERVE_ADMIN_KEY.",
            envvar="EVERSERVE_ADMIN_KEY",
        ),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="Names by which clients may ask for this server (their Host header), besides the loopback names and"
            " the address it listens on. May be given several times, or with commas; * allows all."
        ),
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
            " off: nowhere, streams of a dead worker are computed again. Default: mirror on a CPU, anchor on a GPU."
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
    resume_memory_bytes: Annotated[
        int, typer.Option(help="Memory for streams with an X-Request-Id, so that their clients can come back.", min=0)
    ] = 256 << 20,
    enable_chaos: Annotated[bool, typer.Option("--enable-chaos", help="Allow fault injection over HTTP.")] = False,
    event_log: Annotated[Path | None, typer.Option(help="Directory for typed events, a file per process.")] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="Send a trace of each request there, as OTLP over HTTP: http://localhost:4318/v1/traces."),
    ] = None,
) -> None:
    """Serve a model over the OpenAI API."""
    flags = Flags(**locals())
    check_values(flags)
    tracing.ask_for(otlp_traces_endpoint)
    directory = resolve_model(model)
    model_config = ModelConfig.from_directory(directory)
    check_model(flags, model_config)
    check_compiler()
    chosen = choose(device, share_device, attention_workers + expert_workers)
    start = orchestrator_settings(flags, directory, model_config, chosen)
    listen = listen_on(host, port)
    bars = FollowingBars(url_of(listen), api_key or [], f"everserve: {model}")
    supervisor = Supervisor(
        listen,
        structs.replace(gateway_settings(flags, directory), listen_host=listen.getsockname()[0]),
        start,
        grace_s=shutdown_timeout,
        event_log=start.event_log,
        on_ready=lambda url: _say_ready(model, url, bars),
        share_device=chosen.share,
        num_spares=spares,
    )
    with bars:
        sys.exit(supervisor.run())


def _say_ready(model: str, url: str, bars: FollowingBars) -> None:
    bars.stop()
    print(f"everserve: {model} ready at {url}", file=sys.stderr, flush=True)
