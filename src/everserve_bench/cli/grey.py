"""`everserve bench grey`: a worker answers, but slowly."""

from typing import Annotated

import typer

from everserve_bench.cli.app import bench_app
from everserve_bench.cli.options import Out, Streams, Tokens, exit_unless


@bench_app.command()
def grey(
    streams: Streams = 8,
    tokens: Tokens = 400,
    seconds: Annotated[float, typer.Option(help="How long a worker is slow, in each case.", min=3)] = 20.0,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Only these cases, by parts of their names; repeatable: expert, stopped 80."),
    ] = None,
    quiet: Annotated[
        float, typer.Option(help="Instead: busy neighbours for so many seconds; counts false alarms.", min=0)
    ] = 0.0,
    out: Out = None,
) -> None:
    """One of 2+3 workers is slow. How soon that is found, and times between tokens with and without.

    Exit status 1 if a stream lost a token or got a different one; with --quiet, also if a worker was accused.
    """
    from everserve_bench import grey as benchmark  # noqa: PLC0415 (torch)

    cases = tuple(one for one in benchmark.CASES if not case or any(part in str(one) for part in case))
    if not cases:
        raise typer.BadParameter("no case has such a name", param_hint="--case")
    settings = benchmark.Settings(
        num_streams=streams, max_tokens=tokens, disturbed_s=seconds, quiet_s=quiet, cases=cases
    )
    exit_unless(benchmark.run(settings, out))
