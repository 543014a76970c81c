"""`everserve bench load`: what clients see under real loads."""

from typing import Annotated

import typer

from everserve_bench.cli.app import bench_app
from everserve_bench.cli.options import (
    AnyExpertWorkers,
    AttentionWorkers,
    Layers,
    Out,
    Serve,
    Shape,
    exit_unless,
    split_flags,
)


@bench_app.command()
def load(
    rate: Annotated[
        list[float] | None, typer.Option(help="Requests per second; repeatable. Default: 1, 2, 4, 8, 16.", min=0.01)
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of each rate, on each variant.", min=1)] = 30.0,
    trace: Annotated[str, typer.Option(help="Whose lengths: azure-conv, azure-code or mooncake-conv.")] = "azure-conv",
    scale: Annotated[float, typer.Option(help="Lengths are multiplied by it.", min=0.001, max=10)] = 0.1,
    variant: Annotated[
        list[str] | None, typer.Option(help="protected, unprotected, 'under kills'; repeatable. Default: all.")
    ] = None,
    kill_every_s: Annotated[float, typer.Option(help="One worker of each kind is killed so often.", min=2)] = 60.0,
    attention_workers: AttentionWorkers = 2,
    expert_workers: AnyExpertWorkers = 2,
    shape: Shape = "bundled",
    layers: Layers = None,
    serve: Serve = "",
    out: Out = None,
) -> None:
    """Requests at random times, at rising rates. With lengths of a real service: time to first token, time between
    tokens, tokens/s; with and without protections, and while workers are killed.

    Exit status 1 if a request failed, or if variants answered different tokens.
    """
    from everserve_bench import open_load as benchmark  # noqa: PLC0415 (torch)

    settings = benchmark.Settings(
        rates=tuple(rate or (1.0, 2.0, 4.0, 8.0, 16.0)),
        duration_s=seconds,
        trace=trace,
        scale=scale,
        variants=tuple(variant or benchmark.VARIANTS),
        kill_every_s=kill_every_s,
        num_attention=attention_workers,
        num_expert=expert_workers,
        shape=shape,
        num_layers=layers,
        serve=split_flags(serve),
    )
    exit_unless(benchmark.run(settings, out))
