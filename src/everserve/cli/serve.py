"""`everserve serve MODEL`: a whole instance under a supervisor, in the foreground.

Its flags are fields of the configs in config/.
"""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from msgspec import structs

from everserve.cli import config_file
from everserve.cli.app import app
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
    with_room,
    worker_settings,
)
from everserve.cli.starting import FollowingBars
from everserve.config.cluster import ClusterConfig
from everserve.config.compute import ComputeConfig
from everserve.config.engine import EngineConfig
from everserve.config.gateway import GatewayConfig
from everserve.config.kvlog import LogConfig
from everserve.config.launch import LaunchConfig
from everserve.config.model import ModelSource
from everserve.gateway.observe import tracing
from everserve.model.config import ModelConfig
from everserve.model.fingerprint import fingerprint
from everserve.procs import early_zygote
from everserve.procs.listening import listen_on, url_of
from everserve.procs.supervisor import Supervisor
from everserve.wire.messages import StartGateway, StartOrchestrator


@app.command()
@expand
def serve(
    model: Annotated[str, typer.Argument(help="A Hugging Face-format directory, or `demo` for the bundled model.")],
    *,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of flags.", callback=config_file.load, is_eager=True)
    ] = None,
    gateway: Said[GatewayConfig],
    cluster: Said[ClusterConfig],
    source: Said[ModelSource],
    engine: Said[EngineConfig],
    kv_log: Said[LogConfig],
    compute: Said[ComputeConfig],
    launch: Said[LaunchConfig],
) -> None:
    """Serve a model over the OpenAI API."""
    # What cannot be served is refused before anything starts.
    workers = cluster.make().resolved()
    own = launch.make()
    events = _event_directory(own)
    directory = resolve_model(model)
    gateway_config = gateway.make(
        model=str(directory), served_model_names=[model], chat_template=_chat_template(own), event_log=events
    )
    tracing.ask_for(own.otlp_traces_endpoint)
    is_divided = workers.tensor_parallel_size is not None
    weights = source.make(directory=str(directory), fingerprint=fingerprint(directory), tensor_parallel=is_divided)
    check_experts(workers, ModelConfig.from_source(weights))
    check_compiler()

    chosen = choose(compute.make().device, own.share_device, workers.num_workers + workers.num_growth)
    check_weights(workers, weights)
    told = worker_settings(weights, engine, kv_log, compute, events, chosen.device, not workers.expert_workers)
    settings = divide_heads(told, workers)
    say_whole_heads(told, settings)
    start = start_orchestrator(with_room(workers, settings), settings, chosen, own.gpu_memory_utilization)
    _run(model, gateway_config, start, chosen.share)


def _event_directory(own: LaunchConfig) -> str | None:
    if own.event_log is None:
        return None
    check_directory(own.event_log, "--event-log", mode=0o700)
    return str(own.event_log.resolve())


def _chat_template(own: LaunchConfig) -> str | None:
    return read_text(own.chat_template, "--chat-template") if own.chat_template is not None else None


def _run(model: str, gateway: GatewayConfig, start: StartOrchestrator, share_device: bool) -> NoReturn:
    """Until the instance ends."""
    listen = listen_on(gateway.host, gateway.port)
    bars = FollowingBars(url_of(listen), gateway.api_keys, f"everserve: {model}")
    supervisor = Supervisor(
        listen,
        StartGateway(config=structs.replace(gateway, listen_host=listen.getsockname()[0])),
        start,
        grace_s=gateway.shutdown_timeout_s,
        event_log=gateway.event_log,
        on_ready=lambda url: _say_ready(model, url, bars),
        share_device=share_device,
        num_spares=start.cluster.spares,
        take_zygote=early_zygote.take,
    )
    with bars:
        sys.exit(supervisor.run())


def _say_ready(model: str, url: str, bars: FollowingBars) -> None:
    bars.stop()
    print(f"everserve: {model} ready at {url}", file=sys.stderr, flush=True)
