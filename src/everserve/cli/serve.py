"""`everserve serve MODEL`: a whole instance under a supervisor, in the foreground.

Most flags are fields of the configs in config/; here are those that only this process needs.
"""

import difflib
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml
from msgspec import structs

from everserve.cli import app
from everserve.cli.devices import choose
from everserve.cli.files import check_directory, read_text
from everserve.cli.flags import Said, expand
from everserve.cli.serve_settings import (
    check_compiler,
    check_experts,
    check_weights,
    divide_heads,
    resolve_model,
    say_whole_heads,
    start_orchestrator,
    without_copies,
    worker_settings,
)
from everserve.cli.starting import FollowingBars
from everserve.config.cluster import ClusterConfig
from everserve.config.compute import ComputeConfig
from everserve.config.engine import EngineConfig
from everserve.config.gateway import GatewayConfig
from everserve.config.kvlog import LogConfig
from everserve.config.model import ModelSource
from everserve.errors import ConfigError
from everserve.gateway.observe import tracing
from everserve.model.config import ModelConfig
from everserve.model.fingerprint import fingerprint
from everserve.procs.listening import listen_on, url_of
from everserve.procs.supervisor import Supervisor
from everserve.wire.messages import StartGateway


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
@expand
def serve(
    model: Annotated[str, typer.Argument(help="A Hugging Face-format directory, or `demo` for the bundled model.")],
    *,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of flags.", callback=_load_config, is_eager=True)
    ] = None,
    gateway: Said[GatewayConfig],
    cluster: Said[ClusterConfig],
    source: Said[ModelSource],
    engine: Said[EngineConfig],
    kv_log: Said[LogConfig],
    compute: Said[ComputeConfig],
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file to use instead of the model's own template.")
    ] = None,
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
    event_log: Annotated[Path | None, typer.Option(help="Directory for typed events, a file per process.")] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="Send a trace of each request there, as OTLP over HTTP: http://localhost:4318/v1/traces."),
    ] = None,
) -> None:
    """Serve a model over the OpenAI API."""
    # What cannot be served is refused before anything starts.
    workers = cluster.make().resolved()
    if gpu_memory_utilization is not None and not 0 < gpu_memory_utilization <= 1:
        raise ConfigError("--gpu-memory-utilization must be above 0 and at most 1")
    if event_log is not None:
        check_directory(event_log, "--event-log", mode=0o700)
    directory = resolve_model(model)
    events = str(event_log.resolve()) if event_log is not None else None
    gateway_config = gateway.make(
        model=str(directory),
        served_model_names=[model],
        chat_template=read_text(chat_template, "--chat-template") if chat_template is not None else None,
        event_log=events,
    )
    tracing.ask_for(otlp_traces_endpoint)
    is_divided = workers.tensor_parallel_size is not None
    weights = source.make(directory=str(directory), fingerprint=fingerprint(directory), tensor_parallel=is_divided)
    check_experts(workers, ModelConfig.from_source(weights))
    check_compiler()

    chosen = choose(compute.make().device, share_device, workers.num_workers + workers.num_growth)
    check_weights(workers, weights)
    told = worker_settings(weights, engine, kv_log, compute, events, chosen.device)
    settings = divide_heads(told, workers)
    say_whole_heads(told, settings)
    workers = without_copies(workers, settings)
    start = start_orchestrator(workers, settings, chosen, gpu_memory_utilization)

    listen = listen_on(gateway_config.host, gateway_config.port)
    bars = FollowingBars(url_of(listen), gateway_config.api_keys, f"everserve: {model}")
    supervisor = Supervisor(
        listen,
        StartGateway(config=structs.replace(gateway_config, listen_host=listen.getsockname()[0])),
        start,
        grace_s=gateway_config.shutdown_timeout_s,
        event_log=events,
        on_ready=lambda url: _say_ready(model, url, bars),
        share_device=chosen.share,
        num_spares=workers.spares,
    )
    with bars:
        sys.exit(supervisor.run())


def _say_ready(model: str, url: str, bars: FollowingBars) -> None:
    bars.stop()
    print(f"everserve: {model} ready at {url}", file=sys.stderr, flush=True)
