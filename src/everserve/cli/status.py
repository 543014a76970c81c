"""`everserve status`: who is here, and is the instance valid."""

import json
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from everserve.cli import app
from everserve.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"


@app.command()
def status(
    url: Annotated[str, typer.Option(help="The server.", envvar="EVERSERVE_URL")] = DEFAULT_URL,
    api_key: Annotated[
        str | None, typer.Option(help="The server's API key, if it has one.", envvar="EVERSERVE_API_KEY")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what /cluster says.")] = False,
) -> None:
    """Show workers, roles, epoch, validity and requests. Exit status 1 if the instance is not valid."""
    cluster = fetch_cluster(url, api_key)
    if as_json:
        typer.echo(json.dumps(cluster, indent=2))
    else:
        _print(cluster)
    if cluster["violations"]:
        raise typer.Exit(1)


def fetch_cluster(url: str, api_key: str | None = None) -> dict[str, Any]:
    """What /cluster says, or one line that says why nothing does."""
    keys = (api_key or "").split()  # the variable may hold all keys that `serve` accepts
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    try:
        response = httpx.get(f"{url}/cluster", headers=headers, timeout=5.0)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise ConfigError(f"{url} wants an API key: see --api-key")
        response.raise_for_status()
        cluster: dict[str, Any] = response.json()
        return cluster
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"no answer from {url} ({error}): is the server running? see --url") from error


def _print(cluster: dict[str, Any]) -> None:
    console = Console()
    verdict = "valid" if not cluster["violations"] else "NOT VALID: " + "; ".join(cluster["violations"])
    console.print(f"epoch {cluster['epoch']}, {verdict}", highlight=False)
    table = Table("name", "rank", "incarnation", "pid", "roles", "state", "requests")
    for process in cluster["processes"]:
        table.add_row(process["name"], "", "", str(process["pid"]), "", "", "")
    for worker in cluster["workers"]:
        table.add_row(
            "worker",
            str(worker["rank"]),
            str(worker["incarnation"]),
            str(worker["pid"]),
            ", ".join(worker["roles"]),
            worker["state"],
            str(worker["requests"]),
        )
    console.print(table)
