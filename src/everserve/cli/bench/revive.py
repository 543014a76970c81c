"""`everserve bench revive`: the ways to go on without hardware that does not come back."""

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


@bench_app.command()
def revive(
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these; repeatable: shadows, attention, repair, mask, switch, mask-switch. Default: all."
        ),
    ] = None,
    streams: Streams = 8,
    prompt: Prompt = 32,
    tokens: Tokens = 256,
    shape: Shape = "bundled",
    layers: Layers = None,
    spares: Spares = None,
    kv_log: KvLog = "mirror",
    serve: Serve = "",
    rounds: Annotated[int, typer.Option(help="Losses of each kind.", min=1)] = 8,
    baseline_rounds: BaselineRounds = 3,
    warm_s: WarmS = 1.0,
    out: Out = None,
) -> None:
    """A device is gone for good under running streams: phases up to the next token, with redundant experts, repair, a
    mask, a role switch in the foreground and in the background; beside it, a full restart.

    Exit status 1 if a token was lost, or different without a mark, if a variant could not be measured, or if on a GPU a
    worker of another device was harmed.
    """
    from everserve.bench import revive as benchmark  # noqa: PLC0415 (torch)

    settings = benchmark.Settings(
        variants=tuple(variant or ()),
        num_streams=streams,
        num_prompt=prompt,
        max_tokens=tokens,
        rounds=rounds,
        baseline_rounds=baseline_rounds,
        warm_s=warm_s,
        shape=shape,
        num_layers=layers,
        spares=spares,
        kv_log=kv_log,
        serve=split_flags(serve),
    )
    exit_unless(benchmark.run(settings, out))
