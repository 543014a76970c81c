"""`everserve chaos`: many clients, random faults, and a verdict on every token."""

import json
import random
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from everserve.cli import app
from everserve.cli.address import server_url
from everserve.cli.files import check_directory
from everserve.config.cluster import MAX_RANKS
from everserve.errors import ConfigError

_WIDTH = 140  # of the verdict where there is no terminal


@app.command()
def chaos(
    model: Annotated[str, typer.Argument(help="Model of the server that is started for the run.")] = "demo",
    url: Annotated[  # only as a flag: an environment variable that names a server does not mean that it may be attacked
        str | None,
        typer.Option(help="Check a running server instead; it must run with --enable-chaos.", callback=server_url),
    ] = None,
    seconds: Annotated[float, typer.Option(help="For how many seconds faults are injected.", min=1)] = 90.0,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same requests and same faults. Default: a random one.", min=0)
    ] = None,
    clients: Annotated[
        int, typer.Option(help="Number of concurrent clients; each sends one request after the other.", min=1, max=256)
    ] = 8,
    requests: Annotated[
        int, typer.Option(help="How many different requests there are, among which clients choose.", min=4)
    ] = 32,
    stall_limit: Annotated[
        float, typer.Option(help="A stream without an event for this many seconds counts as hanging.", min=1)
    ] = 30.0,
    attention_workers: Annotated[
        int | None, typer.Option(help="Attention workers of the server. Default: 2.", min=1, max=MAX_RANKS)
    ] = None,
    expert_workers: Annotated[
        int | None, typer.Option(help="Expert workers of the server. Default: 2.", min=0, max=MAX_RANKS)
    ] = None,
    data_parallel_size: Annotated[
        int | None,
        typer.Option("--data-parallel-size", "-dp", help="So many attention workers instead.", min=1, max=MAX_RANKS),
    ] = None,
    enable_expert_parallel: Annotated[
        bool,
        typer.Option(
            "--enable-expert-parallel", help="With -dp N: N devices with an attention and an expert worker each."
        ),
    ] = False,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel-size",
            "-tp",
            help="So many devices instead, over which every layer is divided.",
            min=1,
            max=MAX_RANKS // 2,
        ),
    ] = None,
    kv_log: Annotated[str | None, typer.Option(help="KV log of the server: mirror, anchor or off.")] = None,
    serve: Annotated[
        str, typer.Option(help="More flags of the server, in one string: --serve '--block-size 32'.")
    ] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the verdict and all faults to this file.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The server's API key, if it has one.", envvar="EVERSERVE_API_KEY")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(help="The server's admin key, if it has one.", envvar="EVERSERVE_ADMIN_KEY")
    ] = None,
) -> None:
    """Kill, stop and drain processes and lose devices under running streams; compare every token with the undisturbed
    run.

    Starts a server of its own, unless --url names one. Exit status 1 if anything was lost, doubled or changed, hangs or
    leaks.
    """
    if json_file is not None:
        check_directory(json_file.parent, "--json")
    from everserve.chaos import run  # noqa: PLC0415 (its import is slow)
    from everserve.chaos.target import Target  # noqa: PLC0415
    from everserve.progress import Progress  # noqa: PLC0415

    settings = run.Settings(
        seconds=seconds,
        seed=random.SystemRandom().randrange(1 << 31) if seed is None else seed,
        num_clients=clients,
        stall_limit_s=stall_limit,
        num_requests=requests,
    )
    if url is not None:
        given = (attention_workers, expert_workers, data_parallel_size, tensor_parallel_size, kv_log)
        if any(flag is not None for flag in given) or enable_expert_parallel or serve:
            raise ConfigError("--url: the server runs already; flags for a server make no sense")
        with Progress() as progress:
            verdict = run.check_running(Target(url, api_key, admin_key), settings, progress)
    else:
        workers = _workers(
            attention_workers, expert_workers, data_parallel_size, tensor_parallel_size, enable_expert_parallel
        )
        log = ["--kv-log", kv_log] if kv_log is not None else []
        with Progress() as progress:
            flags = [*workers, *log, *shlex.split(serve)]
            verdict = run.check_own(model, flags, settings, progress, api_key, admin_key)
    console = Console()
    verdict.show(console if console.is_terminal else Console(width=_WIDTH))
    if json_file is not None:
        _write(json_file, verdict.as_json())
        typer.echo(f"written to {json_file}")
    if not verdict.is_good:
        raise typer.Exit(1)


def _workers(
    num_attention: int | None,
    num_expert: int | None,
    data_parallel_size: int | None,
    tensor_parallel_size: int | None,
    has_expert_parallel: bool,
) -> list[str]:
    """Flags of the server: what was said, else two workers of each role."""
    said = {
        "--attention-workers": num_attention,
        "--expert-workers": num_expert,
        "--data-parallel-size": data_parallel_size,
        "--tensor-parallel-size": tensor_parallel_size,
    }
    if data_parallel_size is None and tensor_parallel_size is None:
        said |= {"--attention-workers": num_attention or 2, "--expert-workers": 2 if num_expert is None else num_expert}
    flags = [word for flag, value in said.items() if value is not None for word in (flag, str(value))]
    return [*flags, "--enable-expert-parallel"] if has_expert_parallel else flags


def _write(path: Path, result: dict[str, object]) -> None:
    """With commit and hardware, as benchmarks have them."""
    from everserve.bench.report import environment  # noqa: PLC0415 (torch)

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n")
