"""`everserve bench guided`: what schemas cost."""

from typing import Annotated

import typer

from everserve_bench.cli.app import bench_app
from everserve_bench.cli.options import Out, Repetitions


@bench_app.command()
def guided(
    model: Annotated[str, typer.Option(help="A directory, or demo.")] = "demo",
    rounds: Repetitions = 5,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream.", min=2)] = 128,
    neighbours: Annotated[int, typer.Option(help="Streams beside a guided one.", min=1)] = 7,
    out: Out = None,
) -> None:
    """A guided stream and those beside it, against unguided ones. Time and CPU time of a token, and the first token."""
    from everserve_bench import guided as benchmark  # noqa: PLC0415

    benchmark.run(benchmark.Settings(rounds=rounds, tokens=tokens, neighbours=neighbours), model, out)
