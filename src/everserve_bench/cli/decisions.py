"""`everserve bench decisions`: the orchestrator's decisions as an instance grows."""

from typing import Annotated

import typer

from everserve_bench.cli.app import bench_app
from everserve_bench.cli.options import Out, exit_unless

_LAYERS = ("alike", "different")


@bench_app.command()
def decisions(
    seats: Annotated[
        list[int] | None, typer.Option(help="Seats of the instance, half of each role; repeatable.", min=4)
    ] = None,
    layers: Annotated[
        list[str] | None, typer.Option(help="alike or different: do layers have the same placement? Default: both.")
    ] = None,
    out: Out = None,
) -> None:
    """Core time and bytes of decisions, from 64 to 512 seats.

    Exit status 1 if one decision takes 20 ms or longer, or one event tells 1 MB or more.
    """
    from everserve_bench import decisions as benchmark  # noqa: PLC0415

    wrong = set(layers or ()).difference(_LAYERS)
    if wrong:
        raise typer.BadParameter(f"{min(wrong)}: alike or different", param_hint="--layers")
    settings = benchmark.Settings(tuple(seats or (64, 128, 256, 512)), tuple(layers or _LAYERS))
    exit_unless(benchmark.run(settings, out))
