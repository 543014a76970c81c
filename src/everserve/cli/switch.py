"""`everserve switch`: an attention worker becomes an expert worker, or the reverse, while the server serves."""

import time
from enum import StrEnum
from typing import Annotated, Any

import typer

from everserve.cli.address import DEFAULT_URL, AdminKey, ApiKey, Url
from everserve.cli.app import app
from everserve.cli.following import follow
from everserve.cli.status import administer, fetch_cluster
from everserve.config.cluster import MAX_RANKS


class RoleName(StrEnum):
    ATTENTION = "attention"
    EXPERT = "expert"


@app.command()
def switch(
    rank: Annotated[int, typer.Argument(help="The worker.", min=0, max=MAX_RANKS - 1)],
    role: Annotated[RoleName, typer.Option(help="The role that it should have.")],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Show progress until it is done.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.", min=1)] = 600.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Give a worker another role under load. Its streams move, or other workers load its experts first; then it leaves
    and starts again in its new role."""
    began_s = time.monotonic()
    administer(f"{url}/cluster/switch", admin_key, api_key, {"rank": rank, "role": role.value})
    typer.echo(f"rank {rank} becomes an {role.value} worker")
    if wait:
        client_key = api_key or admin_key
        follow(lambda: _progress(fetch_cluster(url, client_key), rank, role.value), began_s, timeout)


def _progress(cluster: dict[str, Any], rank: int, role: str) -> str | None:
    """None: it is ready in its new role."""
    worker = next((one for one in cluster["workers"] if one["rank"] == rank), None)
    if worker is None:
        return "gone"
    is_done = worker["roles"] == [role] and worker["state"] == "ready"
    return None if is_done else f"rank {rank} is {worker['state']}, {' and '.join(worker['roles'])}"
