"""`everserve scale`: more or fewer workers while the server serves. Clients do not notice."""

import time
from collections import Counter
from typing import Annotated, Any

import typer

from everserve.cli import app
from everserve.cli.address import server_url
from everserve.cli.status import DEFAULT_URL, administer, fetch_cluster
from everserve.config.cluster import MAX_RANKS
from everserve.errors import ConfigError

_LOOK_EVERY_S = 0.1


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
    url: Annotated[str, typer.Option(help="The server.", envvar="EVERSERVE_URL", callback=server_url)] = DEFAULT_URL,
    api_key: Annotated[
        str | None, typer.Option(help="The server's API key, if it has one.", envvar="EVERSERVE_API_KEY")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(help="The server's admin key, if it has one.", envvar="EVERSERVE_ADMIN_KEY")
    ] = None,
) -> None:
    """Change the number of workers under load: new ones take streams and experts when they are ready, and those that
    leave give theirs to others first."""
    asked = {"attention": attention, "expert": expert, "devices": devices}
    body = {name: number for name, number in asked.items() if number is not None}
    if not body or (devices is not None and len(body) > 1):
        raise ConfigError("scale: say --attention and --expert (or one of them), or --devices")
    began_s = time.monotonic()
    goal = administer(f"{url}/cluster/scale", admin_key, api_key, body)
    typer.echo(_plan(goal))
    if wait:
        _follow(url, api_key or admin_key, goal, began_s, timeout)


def _plan(goal: dict[str, Any]) -> str:
    changes = [f"{what} {_ranks(goal[key])}" for key, what in (("added", "new:"), ("retired", "leaving:")) if goal[key]]
    wanted = f"{goal['attention']} attention and {goal['expert']} expert workers on {goal['devices']} devices"
    return f"{wanted}; {', '.join(changes) or 'no change'}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _follow(url: str, api_key: str | None, goal: dict[str, Any], began_s: float, timeout_s: float) -> None:
    """Until there are exactly the workers that were asked for, all ready."""
    said = ""
    while True:
        workers = fetch_cluster(url, api_key)["workers"]
        took_s = time.monotonic() - began_s
        if _is_done(workers, goal):
            typer.echo(f"done after {took_s:.1f} s")
            return
        if (now := _progress(workers)) != said:
            said = now
            typer.echo(f"{took_s:6.1f} s  {now}")
        if took_s > timeout_s:
            raise ConfigError(f"not done after {timeout_s:g} s, and still going on: see `everserve status`")
        time.sleep(_LOOK_EVERY_S)


def _is_done(workers: list[dict[str, Any]], goal: dict[str, Any]) -> bool:
    found = Counter(_role(worker) for worker in workers)
    is_ready = all(worker["state"] == "ready" for worker in workers)
    return is_ready and (found["attention"], found["expert"]) == (goal["attention"], goal["expert"])


def _progress(workers: list[dict[str, Any]]) -> str:
    ready = Counter(_role(worker) for worker in workers if worker["state"] == "ready")
    away = [f"rank {worker['rank']} is {worker['state']}" for worker in workers if worker["state"] != "ready"]
    parts = [f"{ready[role]} {role}" for role in ("attention", "expert") if ready[role]]
    return "; ".join([f"{' and '.join(parts) or 'no'} workers ready", *away])


def _role(worker: dict[str, Any]) -> str:
    return "attention" if "attention" in worker["roles"] else "expert"
