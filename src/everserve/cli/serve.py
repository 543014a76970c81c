"""`everserve serve MODEL`: a whole instance under a supervisor, in the foreground.

Its flags are fields of the configs in config/.
"""

import os
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from msgspec import structs

from everserve.cli import config_file
from everserve.cli.app import app
from everserve.cli.devices import check_heads, choose
from everserve.cli.files import check_directory, read_text
from everserve.cli.flags import Said, expand
from everserve.cli.foreign_flags import ServeCommand
from everserve.cli.model_files import check_model, resolve_model
from everserve.cli.serve_settings import (
    check_experts,
    check_libraries,
    check_weights,
    divide_heads,
    say_whole_heads,
    start_carrier,
    start_orchestrator,
    with_room,
    worker_settings,
)
from everserve.cli.starting import bars_beside
from everserve.cli.survive_losses import with_places
from everserve.config.cluster import ClusterConfig
from everserve.config.compute import ComputeConfig
from everserve.config.engine import EngineConfig
from everserve.config.events import EventLogConfig
from everserve.config.gateway import GatewayConfig
from everserve.config.kvlog import LogConfig
from everserve.config.launch import LaunchConfig
from everserve.config.model import ModelSource
from everserve.gateway.observe import tracing
from everserve.model.config import ModelConfig
from everserve.procs import early_zygote, logs, root_end
from everserve.procs.keepers import GatewayMemory
from everserve.procs.listening import listen_on, url_of
from everserve.procs.process_table import Instance
from everserve.procs.state_directory import StateDirectory
from everserve.procs.supervisor import Supervisor, say_ready
from everserve.wire.messages import StartCarrier, StartGateway, StartOrchestrator


@app.command(cls=ServeCommand)
@expand
def serve(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face-format directory, a name of the hub, or `demo` for the bundled model.")
    ],
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
    event_log: Said[EventLogConfig],
    launch: Said[LaunchConfig],
) -> None:
    """Serve a model over the OpenAI API."""
    own = launch.make()
    logs.begin(own.log_format, own.log_level)
    # What cannot be served is refused before anything starts.
    workers = cluster.make().resolved()
    events = _in_directory(event_log.make())
    gateway_config = gateway.make(
        model=model, served_model_names=[model], chat_template=_chat_template(own), event_log=events
    )
    tracing.ask_for(own.otlp_traces_endpoint)
    asked = source.make(directory=model, tensor_parallel=workers.tensor_parallel_size is not None)
    check_weights(workers, asked)
    device = compute.make().device
    check_libraries()

    # What does not depend on the model comes first: it may be downloaded now.
    directory = str(resolve_model(model, own.revision, own.hf_token))
    gateway_config = structs.replace(gateway_config, model=directory, root="" if Path(model).is_dir() else model)
    weights = check_model(structs.replace(asked, directory=directory))
    found = ModelConfig.from_source(weights)
    check_experts(workers, found)
    chosen = choose(device, own.share_device, workers.num_workers + workers.num_growth)
    check_heads(found, chosen.device)
    told = worker_settings(weights, engine, kv_log, compute, events, chosen.device, not workers.expert_workers)
    settings = divide_heads(told, workers)
    say_whole_heads(told)
    workers = with_room(with_places(workers, settings, len(chosen.devices)), settings)
    start = start_orchestrator(workers, settings, chosen, own.gpu_memory_utilization)
    carrier = start_carrier(own, start, gateway_config)
    _run(model, gateway_config, start, chosen.share, own.log_format == "text", carrier)


def _in_directory(events: EventLogConfig) -> EventLogConfig:
    """Where files can be written."""
    if events.directory is None:
        return events
    directory = Path(events.directory)
    check_directory(directory, "--event-log", mode=0o700)
    return structs.replace(events, directory=str(directory.resolve()))


def _chat_template(own: LaunchConfig) -> str | None:
    return read_text(own.chat_template, "--chat-template") if own.chat_template is not None else None


def _run(
    model: str,
    gateway: GatewayConfig,
    start: StartOrchestrator,
    share_device: bool,
    has_bars: bool,
    start_carrier: StartCarrier | None,
) -> NoReturn:
    """Until the instance ends. This process is the supervisor, from now on."""
    root = root_end.here
    assert root is not None, "root has made this process"
    listen = listen_on(gateway.host, gateway.port)
    url = url_of(listen)
    with (
        closing(StateDirectory.open(_state_directory(gateway))) as state,
        bars_beside(url, gateway.api_keys, f"everserve: {model}", has_bars) as keeps,
    ):
        config = structs.replace(gateway, listen_host=listen.getsockname()[0], state_dir=str(state.path))
        instance = Instance(
            model=model,
            url=url,
            start_gateway=StartGateway(config=config),
            start_orchestrator=start,
            grace_s=gateway.shutdown_timeout_s,
            event_log=gateway.event_log,
            environment=dict(os.environ),
            share_device=share_device,
            num_spares=start.cluster.spares,
            keeps=keeps,
            state=state.row(),
            start_carrier=start_carrier,
        )
        ready = partial(say_ready, model)
        memory = GatewayMemory.new(listen.detach(), gateway)
        sys.exit(Supervisor(instance, root, memory, ready, early_zygote.take).run())


def _state_directory(gateway: GatewayConfig) -> Path | None:
    if gateway.state_dir is None:
        return None
    directory = Path(gateway.state_dir)
    check_directory(directory, "--state-dir", mode=0o700)
    return directory.resolve()
