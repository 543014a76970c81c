"""`everserve simulate`: a fleet in virtual time."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from everserve.cli.app import app
from everserve.cli.files import check_directory
from everserve.cli.flags import Said, expand
from everserve.provenance import environment
from everserve.simulate.settings import Settings
from everserve.words import count

if TYPE_CHECKING:
    from everserve.simulate.fleet import Result

_WIDTH = 140  # where there is no terminal
_NAMES = {
    "everserve": "Everserve",
    "restart": "restart on the hosts that are left",
    "half": "fall back to half of the hosts",
}


@app.command()
@expand
def simulate(
    *,
    settings: Said[Settings],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
) -> None:
    """What a fleet would give in a year of faults, in virtual time.

    Shows capacity, pauses of streams, how even the work is, and bytes moved.

    Runs the orchestrator's decisions and planners, as they are, in virtual time; hosts, processes and weights are
    replaced by how long things take. The same faults are applied to instances that restart, and to such that fall back
    to half of their hosts.

    Exit status 1 if an instance does not become whole again, or leaves experts without a place though there is room.
    """
    if json_file is not None:
        check_directory(json_file.parent, "--json")
    from everserve.simulate.fleet import simulate as run  # noqa: PLC0415 (its import is slow)

    asked = settings.make()
    err = Console(stderr=True)
    with err.status("simulating") as status:
        result = run(asked, lambda done: status.update(f"{done} of {count(asked.instances, 'instance')}"))
    console = Console()
    _show(console if console.is_terminal else Console(width=_WIDTH), result)
    if json_file is not None:
        json_file.write_text(json.dumps({"environment": environment(), **result.as_json()}, indent=1) + "\n")
        typer.echo(f"written to {json_file}")
    if result.findings:
        raise typer.Exit(1)


def _show(console: Console, result: "Result") -> None:
    settings, found = result.settings, result.as_json()
    num_hosts = settings.instances * settings.num_hosts
    faults = ", ".join(f"{number} {what}" for what, number in found["faults"].items())
    console.print(
        f"{count(settings.instances, 'instance')} of {settings.seats} workers on {count(num_hosts, 'host')},"
        f" {settings.days:g} days: {faults} (hosts lost and back, processes crashed)"
    )
    table = Table("", *_COLUMNS, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, one in found["policies"].items():
        table.add_row(_NAMES[name], *_cells(one))
    console.print(table)
    for finding in result.findings:
        console.print(f"FOUND {finding}", style="red")
    console.print(f"{result.num_decisions:,} decisions in {result.core_s:,.0f} s of core time, seed {settings.seed}")


_COLUMNS = (
    "capacity",
    "pauses > 1 s per stream and year",
    "paused, s per stream and year",
    "pause p50 / p99 / longest, s",
    "max/mean work",
    "weights, TB",
    "KV, TB",
)


def _cells(one: dict[str, Any]) -> list[str]:
    pause = one["pause_s"]
    return [
        f"{100 * one['capacity']:.3f} %",
        f"{one['pauses_over_1s_per_stream_year']:,.2f}",
        f"{one['paused_s_per_stream_year']:,.1f}",
        f"{pause['p50']:,.2f} / {pause['p99']:,.2f} / {pause['max']:,.1f}",
        f"{one['imbalance']:.3f}" if one["imbalance"] is not None else "",
        f"{one['weights_tb']:,.1f}",
        f"{one['kv_tb']:,.1f}",
    ]
