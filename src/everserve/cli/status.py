"""`everserve status`: the workers, and whether the instance is valid."""

import functools
import json
from collections.abc import Sequence
from typing import Annotated, Any

import httpx
import typer

from everserve.cli.address import DEFAULT_URL, ApiKey, Url
from everserve.cli.app import app
from everserve.client import key_headers, unauthorized
from everserve.errors import ConfigError

_ANSWER_S = 15.0


@app.command()
def status(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON of /cluster.")] = False,
    experts: Annotated[bool, typer.Option("--experts", help="Show the load and places of experts.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Update the screen until Ctrl-C.")] = False,
) -> None:
    """Show workers, roles, epoch, placement, validity and requests. Exit status 1 if the instance is not valid."""
    if watch:
        from everserve.cli import watch as live  # noqa: PLC0415 (`status` is for scripts too, and should be quick)

        live.watch(url, api_key)
        return
    if experts:
        found = ask("GET", f"{url}/cluster/experts", key_headers(api_key))
        typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_experts_lines(found)))
        return
    cluster = fetch_cluster(url, api_key)
    if as_json:
        typer.echo(json.dumps(cluster, indent=2))
    else:
        _print(cluster)
    if cluster["violations"]:
        raise typer.Exit(1)


def fetch_cluster(url: str, api_key: str | None = None) -> dict[str, Any]:
    """The JSON of /cluster, or one line that says why there is none."""
    return ask("GET", f"{url}/cluster", key_headers(api_key))


def administer(
    url: str, admin_key: str | None, api_key: str | None, body: object, within_s: float = _ANSWER_S
) -> dict[str, Any]:
    """Change the cluster: with the admin key if there is one. A server without one takes an API key."""
    flags = "--admin-key, or --api-key if it has no admin key"
    return ask("POST", url, key_headers(admin_key, api_key), body, flags, within_s)


def ask(
    method: str,
    url: str,
    headers: dict[str, str],
    body: object = None,
    key_flags: str = "--api-key",
    within_s: float = _ANSWER_S,
) -> dict[str, Any]:
    """The JSON that a server answers, or one line that says why it does not."""
    try:
        response = _client().request(method, url, headers=headers, json=body, timeout=within_s)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise ConfigError(unauthorized(url, headers, key_flags))
        answer = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"no answer from {url} ({error}): is the server running? see --url") from error
    if not response.is_success or not isinstance(answer, dict):
        raise ConfigError(f"{url} answered {response.status_code}: {_message(answer)}")
    return answer


@functools.cache
def _client() -> httpx.Client:
    """One for all questions of a command: making one takes longer than a question."""
    return httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))


def _message(answer: object) -> str:
    """What an error's body says, if it is one of ours."""
    match answer:
        case {"error": {"message": str(message)}}:
            return message
    return "not an answer of Everserve"


def _print(cluster: dict[str, Any]) -> None:
    """Lines that nothing cuts: a terminal wraps what is too long for it, a file has it all."""
    verdict = "valid" if not cluster["violations"] else "NOT VALID"
    typer.echo(f"epoch {cluster['epoch']}, {verdict}")
    for violation in cluster["violations"]:
        typer.echo(f"  violated: {violation}")
    for what in cluster["degraded"]:
        typer.echo(f"  degraded: {what}")
    for line in device_lines(cluster.get("devices", [])):
        typer.echo(f"  {line}")
    for line in host_lines(cluster.get("hosts", [])):
        typer.echo(f"  {line}")
    for one in cluster.get("survives", []):
        typer.echo(f"  survives {one['failure']}: {one['weights']}, {one['kv']}")
    if kinds := cluster.get("balance", {"kinds": {}})["kinds"]:
        ratios = ", ".join(f"{kind}s {ratio:.2f}" for kind, ratio in kinds.items())
        typer.echo(f"busiest device over the mean: {ratios}")
    for host in sorted({process.get("host", 0) for process in cluster["processes"]}):
        there = [process for process in cluster["processes"] if process.get("host", 0) == host]
        processes = ", ".join(f"{process['name']} {process['pid']}" for process in there)
        typer.echo(f"processes{f' of host {host}' if host else ''}: {processes}")
    spares = cluster.get("spares", {"wanted": 0})
    if spares["wanted"]:
        typer.echo(f"spares: {spares['ready']} of {spares['wanted']} ready")
    typer.echo()
    for line in _table([_COLUMNS, *map(_cells, cluster["workers"])]):
        typer.echo(line)
    notes = [f"rank {worker['rank']}: {worker['note']}" for worker in cluster["workers"] if worker["note"]]
    if recent := [*notes, *(f"- {sentence}" for sentence in cluster.get("recent", []))]:
        typer.echo("\n" + "\n".join(recent))


def host_lines(hosts: list[dict[str, Any]]) -> list[str]:
    """All hosts, where there are several."""
    return [
        f"host {host['host']} ({host['name'] or 'not known yet'}): {host['state']}, ranks"
        f" {', '.join(map(str, host['workers'])) or 'none'}"
        for host in (hosts if len(hosts) > 1 else [])
    ]


def device_lines(devices: list[dict[str, Any]]) -> list[str]:
    """Devices that are not healthy."""
    found = [device for device in devices if device.get("level")]
    return [f"device {device['device']}: health level {device['level']} ({device['reason']})" for device in found]


_NUM_HOT = 5  # experts of a layer that are listed


def _experts_lines(found: dict[str, Any]) -> list[str]:
    """The busiest experts of each layer, with their places: active ones first, shadows in parentheses."""
    ratio = found["imbalance"]["max_over_mean"]
    if not found["layers"]:
        return ["there are no expert workers"]
    head = "no load" if ratio is None else f"max/mean load of expert workers: {ratio:.2f}"
    rows: list[Sequence[str]] = [("layer", "rows/s", "busiest experts: share of rows @ ranks")]
    for layer in found["layers"]:
        total = sum(expert["load"] for expert in layer["experts"])
        busiest = sorted(layer["experts"], key=lambda expert: -expert["load"])[:_NUM_HOT]
        words = [f"{one['expert']}: {one['load'] / total:.0%} @ {_ranks(one['places'])}" for one in busiest if total]
        rows.append((str(layer["layer"]), f"{total:.0f}", ", ".join(words)))
    return [head, "", *_table(rows)]


def _ranks(places: list[dict[str, Any]]) -> str:
    return " ".join(str(place["rank"]) if place["active"] else f"({place['rank']})" for place in places) or "nowhere"


_COLUMNS = ("rank", "role", "state", "incarnation", "pid", "requests", "KV", "slots")


def _table(rows: list[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be, which is at most 80 in all."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _cells(worker: dict[str, Any]) -> list[str]:
    """One row. Requests and KV belong to the attention role, slots to the expert role. A slow worker is
    ready, and its note says how slow it is."""
    has_kv = "attention" in worker["roles"]
    active, shadow = worker["slots"] - worker["shadow_slots"], worker["shadow_slots"]
    slots = f"{active} + {shadow} shadow" if shadow else str(active or "")
    return [
        str(worker["rank"]),
        "+".join(worker["roles"]),
        "slow" if worker.get("slow") else worker["state"],
        str(worker["incarnation"]),
        str(worker["pid"] or ""),
        str(worker["requests"]) if has_kv else "",
        f"{100 * worker['kv_cache_usage']:.0f} %" if has_kv else "",
        slots,
    ]
