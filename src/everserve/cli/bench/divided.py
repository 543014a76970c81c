"""`everserve bench reshard`, `decline` and `trace`: instances that are divided over devices (`-tp N`) lose some."""

from typing import Annotated

import typer

from everserve.cli.bench.app import bench_app
from everserve.cli.bench.options import (
    KvLog,
    Layers,
    Out,
    Prompt,
    Serve,
    Shape,
    Spares,
    Streams,
    Tokens,
    WarmS,
    exit_unless,
    split_flags,
)
from everserve.config.cluster import MAX_RANKS

_MOST = MAX_RANKS // 2


@bench_app.command()
def reshard(
    devices: Annotated[
        list[int] | None, typer.Option(help="Devices before the loss; repeatable. Default: 8, 4, 3.", min=2, max=_MOST)
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="recompute, oracle, restart, successor, parts, process; repeatable. Default: all."),
    ] = None,
    streams: Streams = 8,
    prompt: Prompt = 128,
    tokens: Tokens = 600,
    rounds: Annotated[int, typer.Option(help="Losses of each kind.", min=1)] = 3,
    warm_s: WarmS = 3.0,
    shape: Shape = "small-llama",
    layers: Layers = None,
    spares: Spares = None,
    serve: Serve = "",
    out: Out = None,
) -> None:
    """One of N devices is lost: pauses and bytes by how much is done again, beside a restart, and four planners.

    Exit status 1 if a stream lost a token or got a different one, or if a loss could not be measured.
    """
    from everserve.bench import reshard as benchmark  # noqa: PLC0415 (torch)

    settings = benchmark.Settings(
        degrees=tuple(devices or (8, 4, 3)),
        variants=tuple(variant or benchmark.VARIANTS),
        num_streams=streams,
        num_prompt=prompt,
        max_tokens=tokens,
        rounds=rounds,
        warm_s=warm_s,
        shape=shape,
        num_layers=layers,
        spares=spares,
        serve=split_flags(serve),
    )
    exit_unless(benchmark.run(settings, out))


@bench_app.command()
def decline(
    devices: Annotated[int, typer.Option(help="Devices at first.", min=3, max=_MOST)] = 8,
    fewest: Annotated[int, typer.Option(help="Devices that are left in the middle.", min=2)] = 2,
    streams: Streams = 8,
    prompt: Prompt = 64,
    tokens: Tokens = 400,
    stay_s: Annotated[float, typer.Option(help="Seconds at each number of devices.", min=1)] = 5.0,
    baseline: Annotated[bool, typer.Option(help="Start new servers with fewer devices, too.")] = True,
    shape: Shape = "small-llama",
    layers: Layers = None,
    kv_log: KvLog = None,
    spares: Spares = None,
    serve: Serve = "",
    out: Out = None,
) -> None:
    """Devices are lost one after the other and come back, under running streams: pauses, time to peak, time lost.

    Exit status 1 if a stream lost a token or got a different one.
    """
    from everserve.bench import decline as benchmark  # noqa: PLC0415 (torch)

    settings = benchmark.Settings(
        num_devices=devices,
        fewest=fewest,
        num_streams=streams,
        num_prompt=prompt,
        max_tokens=tokens,
        stay_s=stay_s,
        has_baseline=baseline,
        shape=shape,
        num_layers=layers,
        kv_log=kv_log,
        spares=spares,
        serve=split_flags(serve),
    )
    exit_unless(benchmark.run(settings, out))


@bench_app.command()
def trace(
    devices: Annotated[int, typer.Option(help="Devices of a node: 2, 4, 8, 16 or 32.", min=2, max=_MOST)] = 8,
    fewest: Annotated[int, typer.Option(help="Devices that a node needs to serve.", min=2)] = 2,
    nodes: Annotated[int, typer.Option(help="How many nodes of the trace, one after the other.", min=1)] = 1,
    seconds: Annotated[float, typer.Option(help="In which each node's 27 hours are served.", min=5)] = 120.0,
    warm_s: Annotated[float, typer.Option(help="Seconds without losses before that.", min=1)] = 5.0,
    bin_s: Annotated[float, typer.Option(help="Tokens/s are told in bins of so many seconds.", min=0.1)] = 1.0,
    seed: Annotated[int, typer.Option(help="Which instances end and begin.", min=0)] = 0,
    streams: Streams = 8,
    prompt: Prompt = 64,
    tokens: Tokens = 400,
    shape: Shape = "small-llama",
    layers: Layers = None,
    kv_log: KvLog = None,
    spares: Spares = None,
    serve: Serve = "",
    out: Out = None,
) -> None:
    """Devices come and go as in a trace of spot A100s, compressed in time: tokens/s beside four other ways to serve it.

    Exit status 1 if a stream lost a token or got a different one.
    """
    from everserve.bench import trace as benchmark  # noqa: PLC0415 (torch)

    settings = benchmark.Settings(
        num_devices=devices,
        fewest=fewest,
        num_nodes=nodes,
        seconds=seconds,
        warm_s=warm_s,
        width_s=bin_s,
        seed=seed,
        num_streams=streams,
        num_prompt=prompt,
        max_tokens=tokens,
        shape=shape,
        num_layers=layers,
        kv_log=kv_log,
        spares=spares,
        serve=split_flags(serve),
    )
    exit_unless(benchmark.run(settings, out))
