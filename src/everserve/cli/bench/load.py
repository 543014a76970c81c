"""`everserve bench load` and `everserve bench cost`: what clients see under real loads, and what a failure costs."""

from typing import Annotated

import typer

from everserve.cli.bench.app import bench_app
from everserve.cli.bench.options import (
    AnyExpertWorkers,
    AttentionWorkers,
    KvLog,
    Layers,
    Out,
    Prompt,
    Serve,
    Shape,
    Streams,
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
    """Requests at random times, with lengths of a real service, at rising rates: time to first token, time between
    tokens, tokens/s; with and without protections, and while workers are killed.

    Exit status 1 if a request failed, or if variants answered different tokens.
    """
    from everserve.bench import open_load as benchmark  # noqa: PLC0415 (torch)

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


@bench_app.command()
def cost(
    token: Annotated[
        list[int] | None,
        typer.Option(help="Kill when streams have so many tokens; repeatable. Default: 16, 64, 256, 1024.", min=1),
    ] = None,
    prompt: Prompt = 128,
    streams: Streams = 8,
    rounds: Annotated[int, typer.Option(help="Kills of each kind at each token.", min=1)] = 3,
    shape: Shape = "bundled",
    layers: Layers = None,
    kv_log: KvLog = None,
    out: Out = None,
) -> None:
    """What a death costs, by the token at which it strikes: predicted from measured constants, and measured; for a
    restart of everything, computing KV again, and the KV log.

    Exit status 1 if a stream lost a token or got a different one.
    """
    from everserve.bench import cost as benchmark  # noqa: PLC0415 (torch)

    settings = benchmark.Settings(
        tokens=tuple(sorted(set(token or (16, 64, 256, 1024)))),
        num_prompt=prompt,
        num_streams=streams,
        rounds=rounds,
        shape=shape,
        num_layers=layers,
        kv_log=kv_log,
    )
    exit_unless(benchmark.run(settings, out))
