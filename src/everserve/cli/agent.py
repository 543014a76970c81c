"""`everserve agent`: this host joins an instance that `everserve serve --hosts N` began on another one."""

import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from everserve.carrier import key
from everserve.cli.app import app
from everserve.cli.model_files import resolve_model
from everserve.cli.serve_settings import check_libraries
from everserve.config.launch import LaunchConfig
from everserve.errors import ConfigError
from everserve.procs import early_zygote, logs, root_end
from everserve.procs.agent import Agent
from everserve.wire.messages import StartFarEnd


@app.command()
def agent(
    model: Annotated[
        str | None,
        typer.Argument(help="Where the model is on this host, as for `serve`. Default: at the first host's path."),
    ] = None,
    join: Annotated[str, typer.Option(metavar="ADDRESS", help="Of the first host: HOST, or HOST:PORT.")] = "",
    cluster_key: Annotated[Path | None, typer.Option(help="The file that the first host has made.")] = None,
    name: Annotated[str, typer.Option(help="Of this host, as others see it. Default: its host name.")] = "",
    log_format: Annotated[str, typer.Option(help="text or json.", envvar="EVERSERVE_LOG_FORMAT")] = "text",
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", envvar="EVERSERVE_LOG_LEVEL")
    ] = "info",
) -> None:
    """Join an instance of several hosts, again and again, until Ctrl-C."""
    config = LaunchConfig(log_format=log_format, log_level=log_level)
    config.check()
    logs.begin(config.log_format, config.log_level)
    if not join:
        raise ConfigError("agent: say with --join which host to join: HOST, or HOST:PORT")
    if cluster_key is None:
        raise ConfigError("agent: --cluster-key is needed: copy the file from the first host")
    path = cluster_key.absolute()
    key.context(path, is_server=False)
    check_libraries()
    start = StartFarEnd(
        address=_address(join, config.cluster_port),
        key_file=str(path),
        name=name or socket.gethostname(),
        model=str(resolve_model(model)) if model is not None else "",
    )
    root = root_end.here
    assert root is not None, "root has made this process"
    sys.exit(Agent(start, root, early_zygote.take).run())


def _address(text: str, default_port: int) -> tuple[str, int]:
    """HOST, HOST:PORT, or [an IPv6 address] with or without a port."""
    host, _, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not host or (":" in host and not host.startswith("[")):
        host, port = text, ""
    if port and not port.isdigit():
        raise ConfigError(f"--join {text}: {port} is not a port")
    return host.strip("[]"), int(port or default_port)
