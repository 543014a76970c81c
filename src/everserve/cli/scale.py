"""`everserve scale`: more or fewer workers while the server serves. Clients do not notice."""

import time
from collections import Counter
from typing import Annotated, Any

import typer

from everserve.cli.address import DEFAULT_URL, AdminKey, ApiKey, Url
from everserve.cli.app import app
from everserve.cli.following import follow
from everserve.cli.status import administer, fetch_cluster
from everserve.config.cluster import MAX_RANKS
from everserve.errors import ConfigError
from everserve.words import count, plural, size


@app.command()
def scale(
    attention: Annotated[
        int | None, typer.Option(help="Attention workers. Default: as many as now.", min=0, max=MAX_RANKS)
    ] = None,
    expert: Annotated[
        int | None, typer.Option(help="Expert workers. Default: as many as now.", min=0, max=MAX_RANKS)
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="Devices, with all workers on them.", min=1, max=MAX_RANKS)
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Show progress until it is done.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.", min=1)] = 600.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Change the number of workers under load. New ones take streams and experts when they are ready, and those that
    leave give theirs to others first."""
    asked = {"attention": attention, "expert": expert, "devices": devices}
    body = {name: number for name, number in asked.items() if number is not None}
    if not body or (devices is not None and len(body) > 1):
        raise ConfigError("scale: say --attention and --expert (or one of them), or --devices")
    began_s = time.monotonic()
    goal = administer(f"{url}/cluster/scale", admin_key, api_key, body)
    typer.echo(_plan(goal))
    if wait:
        follow(lambda: _progress(fetch_cluster(url, api_key or admin_key)["workers"], goal), began_s, timeout)


def _plan(goal: dict[str, Any]) -> str:
    changes = [f"{what} {_ranks(goal[key])}" for key, what in (("added", "new:"), ("retired", "leaving:")) if goal[key]]
    wanted = size(goal["attention"], goal["expert"], goal["devices"])
    return f"{wanted}; {', '.join(changes) or 'no change'}"


def _ranks(ranks: list[int]) -> str:
    return f"{plural('rank', len(ranks))} {', '.join(map(str, ranks))}"


def _progress(workers: list[dict[str, Any]], goal: dict[str, Any]) -> str | None:
    """None: there are exactly the workers that were asked for, all ready."""
    ready = Counter(_role(worker) for worker in workers if worker["state"] == "ready")
    away = [f"rank {worker['rank']} is {worker['state']}" for worker in workers if worker["state"] != "ready"]
    if not away and (ready["attention"], ready["expert"]) == (goal["attention"], goal["expert"]):
        return None
    parts = [count(ready[role], f"{role} worker") for role in ("attention", "expert") if ready[role]]
    return "; ".join([f"{' and '.join(parts) or 'no workers'} ready", *away])


def _role(worker: dict[str, Any]) -> str:
    return "attention" if "attention" in worker["roles"] else "expert"
