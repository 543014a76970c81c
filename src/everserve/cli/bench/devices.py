"""`everserve bench repair` and `scale`: devices are lost, come and go under running streams."""

from typing import Annotated

import typer

from everserve.cli.bench.app import bench_app
from everserve.cli.bench.options import (
    BaselineRounds,
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


@bench_app.command()
def repair(
    devices: Annotated[
        int, typer.Option(help="Devices, with an attention and an expert worker each.", min=2, max=MAX_RANKS // 2)
    ] = 8,
    lost: Annotated[
        list[int] | None, typer.Option(help="Devices lost at once; repeatable. Default: 1, 2, 4.", min=1)
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these cases, by parts of their names; repeatable: gone, device-few, 2-processes-enough."
        ),
    ] = None,
    streams: Streams = 8,
    prompt: Prompt = 32,
    tokens: Tokens = 1500,
    shape: Shape = "bundled",
    layers: Layers = None,
    spares: Spares = None,
    kv_log: Annotated[
        str, typer.Option(help="`--kv-log` of the server. A mirror outlives a device, an anchor only processes.")
    ] = "mirror",
    serve: Serve = "",
    rounds: Annotated[int, typer.Option(help="Losses in each case.", min=1)] = 3,
    baseline_rounds: BaselineRounds = 1,
    warm_s: WarmS = 3.0,
    out: Out = None,
) -> None:
    """Devices are lost under running streams: gaps, time to repair, tokens/s; beside it, a full restart.

    Exit status 1 if a stream lost a token or got a different one, if a loss was not repaired, or if on a GPU a worker
    of another device was harmed.
    """
    from everserve.bench import repair as benchmark  # noqa: PLC0415 (torch)

    settings = benchmark.Settings(
        num_devices=devices,
        lost=tuple(lost or (1, 2, 4)),
        cases=tuple(case or ()),
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
        serve=split_flags(serve),
    )
    exit_unless(benchmark.run(settings, out))


@bench_app.command()
def scale(
    sizes: Annotated[
        str, typer.Option(help="Numbers of devices, one after the other; each has an attention and an expert worker.")
    ] = "2,4,8,3",
    streams: Streams = 8,
    prompt: Prompt = 32,
    tokens: Tokens = 400,
    stay_s: Annotated[float, typer.Option(help="Seconds at each size.", min=0.5)] = 5.0,
    shape: Shape = "bundled",
    layers: Layers = None,
    spares: Spares = None,
    kv_log: KvLog = None,
    out: Out = None,
) -> None:
    """More and fewer devices under running streams: largest gaps and tokens/s.

    Exit status 1 if a stream lost a token or got a different one.
    """
    from everserve.bench import scale as benchmark  # noqa: PLC0415 (torch)

    numbers = [int(text) if text.strip().isdecimal() else 0 for text in sizes.split(",")]
    if len(numbers) < 2 or min(numbers) < 1 or 2 * max(numbers) > MAX_RANKS:
        raise typer.BadParameter(f"two or more numbers from 1 to {MAX_RANKS // 2}: 2,4,8,3", param_hint="--sizes")
    settings = benchmark.Settings(
        sizes=tuple(numbers),
        num_streams=streams,
        max_tokens=tokens,
        stay_s=stay_s,
        shape=shape,
        num_layers=layers,
        num_prompt=prompt,
        spares=spares,
        kv_log=kv_log,
    )
    exit_unless(benchmark.run(settings, out))
