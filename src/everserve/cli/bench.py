"""`everserve bench NAME`: one benchmark; prints a table and writes JSON."""

from pathlib import Path
from typing import Annotated

import typer

from everserve.cli import app

bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks, each with its baseline in the same run.")
app.add_typer(bench_app, name="bench")

Out = Annotated[Path | None, typer.Option(help="Directory for the JSON. Default: bench/results.")]


@bench_app.callback()
def _bench() -> None:
    """Benchmarks, each with its baseline in the same run."""


@bench_app.command()
def engine(
    rounds: Annotated[int, typer.Option(help="Repetitions, interleaved.", min=1)] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Only the comparison with transformers generate.")] = False,
    out: Out = None,
) -> None:
    """One worker through HTTP against transformers: tokens/s, latencies, distance from the memory floor."""
    from everserve.bench import engine as benchmark  # noqa: PLC0415 (torch)

    benchmark.run(rounds, quick, out)
