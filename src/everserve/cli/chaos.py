"""`everserve chaos`: many clients, random faults, and a verdict on every token."""

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from everserve.chaos.settings import OwnServer, Settings
from everserve.cli.address import AdminKey, ApiKey, server_url
from everserve.cli.app import app
from everserve.cli.files import check_directory
from everserve.cli.flags import Said, expand
from everserve.errors import ConfigError
from everserve.provenance import check_out, environment

if TYPE_CHECKING:
    from everserve.chaos.verdict import Verdict

_WIDTH = 140  # of the verdict where there is no terminal


@app.command()
@expand
def chaos(
    model: Annotated[str, typer.Argument(help="Model of the server that is started for the run.")] = "demo",
    *,
    url: Annotated[  # only as a flag: an environment variable that names a server does not mean that it may be attacked
        str | None,
        typer.Option(help="Check a running server instead; it must run with --enable-chaos.", callback=server_url),
    ] = None,
    settings: Said[Settings],
    server: Said[OwnServer],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the verdict and all faults to this file.")
    ] = None,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Random faults under running streams, every token compared.

    Kills, stops and drains processes and loses devices; the tokens must be those of the undisturbed run.

    Starts a server of its own, unless --url names one. Exit status 1 if anything was lost, doubled or changed, hangs or
    leaks.
    """
    if json_file is not None:
        check_directory(json_file.parent, "--json")
        check_out(json_file.parent, "--json")
    from everserve.chaos import run  # noqa: PLC0415 (its import is slow)
    from everserve.chaos.target import Target  # noqa: PLC0415
    from everserve.progress import Progress  # noqa: PLC0415

    storm, own = settings.make(seed=random.SystemRandom().randrange(1 << 31)), server.make()
    if url is not None and own != OwnServer():
        raise ConfigError("--url: the server runs already; flags for a server make no sense")
    with Progress() as progress:
        if url is not None:
            verdict = run.check_running(Target(url, api_key, admin_key), storm, progress)
        else:
            verdict = run.check_own(model, own.flags(), storm, progress, api_key, admin_key)
    _tell(verdict, json_file)


def _tell(verdict: "Verdict", json_file: Path | None) -> None:
    """Tells the verdict on the screen, in the file, and as the exit status."""
    console = Console()
    verdict.show(console if console.is_terminal else Console(width=_WIDTH))
    if json_file is not None:
        _write(json_file, verdict.as_json())
        typer.echo(f"written to {json_file}")
    if not verdict.is_good:
        raise typer.Exit(1)


def _write(path: Path, result: dict[str, object]) -> None:
    """Writes the result with commit and hardware, as benchmarks have them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n")
