"""`everserve kill RANK`: send a signal to a worker, or to another process, to see that clients do not notice."""

from typing import Annotated

import typer

from everserve.cli import app
from everserve.cli.address import server_url
from everserve.cli.status import DEFAULT_URL, administer
from everserve.errors import ConfigError

_SIGNALS = ("KILL", "STOP", "CONT", "TERM")


@app.command()
def kill(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RANK", help="Rank of a worker, or orchestrator, anchor, zygote: see `everserve status`."
        ),
    ],
    signal: Annotated[str, typer.Option(help="KILL, STOP, CONT or TERM.")] = "KILL",
    url: Annotated[str, typer.Option(help="The server.", envvar="EVERSERVE_URL", callback=server_url)] = DEFAULT_URL,
    api_key: Annotated[
        str | None, typer.Option(help="The server's API key, if it has one.", envvar="EVERSERVE_API_KEY")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(help="The server's admin key, if it has one.", envvar="EVERSERVE_ADMIN_KEY")
    ] = None,
) -> None:
    """Inject a fault: send a signal to a process. The server must run with --enable-chaos."""
    name = signal.upper().removeprefix("SIG")
    if name not in _SIGNALS:
        raise ConfigError(f"--signal {signal}: choose one of {', '.join(_SIGNALS)}")
    if target.isdigit():
        sent = administer(f"{url}/cluster/fault", admin_key, api_key, {"rank": int(target), "signal": name})
        typer.echo(f"sent SIG{name} to rank {target} (incarnation {sent['incarnation']}, pid {sent['pid']})")
    else:
        sent = administer(f"{url}/cluster/fault", admin_key, api_key, {"process": target, "signal": name})
        typer.echo(f"sent SIG{name} to the {target} (pid {sent['pid']})")
