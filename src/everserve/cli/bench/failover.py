"""`everserve bench failover` and `scaling`: a worker dies under running streams."""

from typing import Annotated

import typer

from everserve.cli.bench.app import bench_app
from everserve.cli.bench.options import (
    AttentionWorkers,
    BaselineRounds,
    ExpertWorkers,
    KvLog,
    Layers,
    Out,
    Prompt,
    Shape,
    Spares,
    Streams,
    Tokens,
    WarmS,
    exit_unless,
)
from everserve.config.cluster import MAX_RANKS


@bench_app.command()
def failover(
    attention_workers: AttentionWorkers = 2,
    expert_workers: Annotated[
        int, typer.Option(help="Expert workers of the cluster; 0 for a dense model.", min=0, max=MAX_RANKS)
    ] = 2,
    streams: Streams = 8,
    prompt: Prompt = 32,
    tokens: Tokens = 1500,
    shape: Shape = "bundled",
    layers: Layers = None,
    spares: Spares = None,
    kv_log: KvLog = None,
    rounds: Annotated[int, typer.Option(help="Kills of each kind, in turn.", min=1)] = 10,
    baseline_rounds: BaselineRounds = 2,
    warm_s: WarmS = 3.0,
    out: Out = None,
) -> None:
    """A worker is killed under running streams: gaps, tokens lost, time to full strength; beside it, a full restart.

    Exit status 1 if a stream lost a token or got a different one, or if on a GPU a death took another worker along.
    """
    from everserve.bench import failover as benchmark  # noqa: PLC0415 (torch)

    settings = benchmark.Settings(
        num_attention=attention_workers,
        num_expert=expert_workers,
        num_streams=streams,
        max_tokens=tokens,
        rounds=rounds,
        baseline_rounds=baseline_rounds,
        warm_s=warm_s,
        shape=shape,
        num_layers=layers,
        num_prompt=prompt,
        spares=spares,
        kv_log=kv_log,
    )
    exit_unless(benchmark.run(settings, out))


@bench_app.command()
def scaling(
    shape: Shape = "bundled",
    layers: Layers = None,
    streams: Annotated[
        list[int] | None,
        typer.Option(help="Concurrent streams; repeatable. Default: 16, 64, 256; bundled: 4, 16.", min=1, max=256),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of each prompt; repeatable. Default: 512, 2048, 8192; bundled: 128, 1024.", min=1),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of each stream, not counting those it gets while other prompts are computed.", min=16
        ),
    ] = 400,
    most_tokens: Annotated[
        int, typer.Option(help="Leave out points of the grid whose prompts have more tokens in all.", min=1)
    ] = 600_000,
    attention_workers: AttentionWorkers = 2,
    expert_workers: ExpertWorkers = 2,
    spares: Spares = None,
    kv_log: KvLog = None,
    rounds: Annotated[int, typer.Option(help="Kills of each kind at each point of the grid.", min=1)] = 2,
    warm_s: WarmS = 2.0,
    out: Out = None,
) -> None:
    """How recovery grows with the number of running streams and the length of their prompts.

    Exit status 1 if a stream was not exact or a kill could not be measured, or if on a GPU a death took another worker
    along. Cells that do not fit are shown as such.
    """
    from everserve.bench import scaling as benchmark  # noqa: PLC0415 (torch)
    from everserve.bench.grid import scale_of  # noqa: PLC0415

    default = scale_of(shape)
    settings = benchmark.Settings(
        num_attention=attention_workers,
        num_expert=expert_workers,
        streams=tuple(streams or default.streams),
        contexts=tuple(context or default.contexts),
        max_tokens=tokens,
        most_tokens=most_tokens,
        rounds=rounds,
        warm_s=warm_s,
        shape=shape,
        num_layers=layers,
        spares=spares,
        kv_log=kv_log,
    )
    exit_unless(benchmark.run(settings, out))
