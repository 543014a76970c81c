"""`everserve switch`: an attention worker becomes an expert worker, or the reverse, while the server serves."""

import time
from enum import StrEnum
from typing import Annotated

import typer

from everserve.cli import app
from everserve.cli.address import server_url
from everserve.cli.status import DEFAULT_URL, administer, fetch_cluster
from everserve.config.cluster import MAX_RANKS
from everserve.errors import ConfigError

_LOOK_EVERY_S = 0.1


class RoleName(StrEnum):
    ATTENTION = "attention"
    EXPERT = "expert"


@app.command()
def switch(
    rank: Annotated[int, typer.Argument(help="The worker.", min=0, max=MAX_RANKS - 1)],
    role: Annotated[RoleName, typer.Option(help="The role that it should have.")],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Show progress until it is done.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.", min=1)] = 600.0,
    url: Annotated[str, typer.Option(help="The server.", envvar="EVERSERVE_URL", callback=server_url)] = DEFAULT_URL,
    api_key: Annotated[
        str | None, typer.Option(help="The server's API key, if it has one.", envvar="EVERSERVE_API_KEY")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(help="The server's admin key, if it has one.", envvar="EVERSERVE_ADMIN_KEY")
    ] = None,
) -> None:
    """Give a worker another role under load: its streams move, or other workers load its experts first; then it leaves
    and starts again in its new role."""
    began_s = time.monotonic()
    administer(f"{url}/cluster/switch", admin_key, api_key, {"rank": rank, "role": role.value})
    typer.echo(f"rank {rank} becomes an {role.value} worker")
    if wait:
        _follow(url, api_key or admin_key, rank, role.value, began_s, timeout)


def _follow(url: str, api_key: str | None, rank: int, role: str, began_s: float, timeout_s: float) -> None:
    said = ""
    while True:
        worker = next((one for one in fetch_cluster(url, api_key)["workers"] if one["rank"] == rank), None)
        took_s = time.monotonic() - began_s
        if worker is not None and worker["roles"] == [role] and worker["state"] == "ready":
            typer.echo(f"done after {took_s:.1f} s")
            return
        now = f"rank {rank} is {worker['state']}, {' and '.join(worker['roles'])}" if worker is not None else "gone"
        if now != said:
            said = now
            typer.echo(f"{took_s:6.1f} s  {now}")
        if took_s > timeout_s:
            raise ConfigError(f"not done after {timeout_s:g} s, and still going on: see `everserve status`")
        time.sleep(_LOOK_EVERY_S)
