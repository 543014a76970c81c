"""`everserve drain RANK`: a worker gives its streams to other workers, exits and is replaced. Clients do not notice."""

import time
from typing import Annotated, Any

import typer

from everserve.cli.address import DEFAULT_URL, AdminKey, ApiKey, Url
from everserve.cli.app import app
from everserve.cli.status import administer, fetch_cluster
from everserve.errors import ConfigError

_LOOK_EVERY_S = 0.1


@app.command()
def drain(
    ranks: Annotated[
        list[int] | None, typer.Argument(help="Ranks of workers, drained one after the other; see `everserve status`.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every worker, one after the other: a rolling restart.")] = False,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for each new worker to be ready. 0: do not wait.", min=0)
    ] = 60.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Restart workers under load. Each gives its streams to other workers and exits; a new process takes its rank."""
    if every == bool(ranks):
        raise ConfigError("drain: either name the ranks, or say --all")
    if every and not wait:
        raise ConfigError("drain --all --wait 0 would restart everything at once; leave --wait out")
    restart_each(url, admin_key, api_key or admin_key, api_key, ranks, wait)


def restart_each(
    url: str, admin_key: str | None, client_key: str | None, api_key: str | None, ranks: list[int] | None, wait: float
) -> None:
    """One after the other; None: every worker."""
    for rank in ranks or _all_ranks(url, client_key, wait):
        began_s = time.monotonic()
        asked = administer(f"{url}/cluster/drain", admin_key, api_key, {"rank": rank})
        incarnation = asked["incarnation"]
        if not wait:
            typer.echo(f"rank {rank}: incarnation {incarnation} leaves")
            continue
        successor = _wait_for_successor(url, client_key, rank, incarnation, wait)
        took_s = time.monotonic() - began_s
        typer.echo(f"rank {rank}: {incarnation} left, {successor['incarnation']} is ready after {took_s:.1f} s")


def _all_ranks(url: str, api_key: str | None, wait_s: float) -> list[int]:
    """A gateway that has just begun does not know them yet."""
    deadline = time.monotonic() + wait_s
    while not (workers := fetch_cluster(url, api_key)["workers"]) and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    return [worker["rank"] for worker in workers]


def _wait_for_successor(url: str, api_key: str | None, rank: int, incarnation: int, wait_s: float) -> dict[str, Any]:
    """The new worker with this rank, once the cluster is at full strength: only then may the next worker leave."""
    deadline = time.monotonic() + wait_s
    while True:
        cluster = fetch_cluster(url, api_key)
        worker: dict[str, Any] | None = next((one for one in cluster["workers"] if one["rank"] == rank), None)
        is_whole = not cluster["violations"] and not cluster["degraded"]
        if worker is not None and worker["incarnation"] > incarnation and worker["state"] == "ready" and is_whole:
            return worker
        if time.monotonic() > deadline:
            raise ConfigError(f"rank {rank} has no ready successor after {wait_s:g} s: see `everserve status`")
        time.sleep(_LOOK_EVERY_S)
