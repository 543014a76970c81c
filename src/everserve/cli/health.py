"""`everserve health`: how healthy devices are. `everserve health D LEVEL`: say it."""

from typing import Annotated, Any

import typer

from everserve.cli.address import DEFAULT_URL, AdminKey, ApiKey, Url
from everserve.cli.app import app
from everserve.cli.status import administer, fetch_cluster
from everserve.errors import ConfigError
from everserve.tables.health import WORDS, Level


@app.command()
def health(
    device: Annotated[int | None, typer.Argument(help="A device: see `everserve health`.", min=0)] = None,
    level: Annotated[
        int | None,
        typer.Argument(
            help="0 healthy, 1 note, 2 drain when quiet, 3 drain, 4 evacuate, 5 evacuate, then isolate, 6 isolate.",
            min=min(Level),
            max=max(Level),
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for other operators.")] = "",
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Show the health level of every device, or set one. From level 2 on its workers leave before it fails, and come
    back at level 0."""
    if (device is None) != (level is None):
        raise ConfigError("health: name a device and its level, or neither")
    if device is None:
        for one in fetch_cluster(url, api_key or admin_key)["devices"]:
            typer.echo(_line(one))
        return
    body = {"device": device, "level": level, "reason": reason}
    typer.echo(administer(f"{url}/cluster/health", admin_key, api_key, body)["done"])


def _line(device: dict[str, Any]) -> str:
    words = [f"device {device['device']}", device["state"], f"level {device['level']}: {WORDS[Level(device['level'])]}"]
    words += [device[key] for key in ("reason", "note") if device[key]]
    return "  ".join(words)
