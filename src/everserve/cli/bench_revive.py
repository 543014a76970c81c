"""`everserve bench revive`: the ways to go on without hardware that does not come back."""

import shlex
from typing import Annotated

import typer

from everserve.cli.bench import KvLog, Layers, Out, Shape, Spares, bench_app


@bench_app.command()
def revive(
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these; repeatable: shadows, attention, repair, mask, switch, mask-switch. Default: all."
        ),
    ] = None,
    streams: Annotated[int, typer.Option(help="Concurrent streams.", min=1, max=256)] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream; one that ends is started again.", min=16)] = 256,
    shape: Shape = "bundled",
    layers: Layers = None,
    spares: Spares = None,
    kv_log: KvLog = "mirror",
    serve: Annotated[
        str, typer.Option(help="More flags of the servers, in one string: --serve '--detect-ms 100'.")
    ] = "",
    rounds: Annotated[int, typer.Option(help="Losses of each kind.", min=1)] = 8,
    baseline_rounds: Annotated[int, typer.Option(help="Restarts of the whole instance.", min=0)] = 3,
    warm_s: Annotated[float, typer.Option(help="Seconds of undisturbed streams before each loss.", min=0.5)] = 1.0,
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
        serve=tuple(shlex.split(serve)),
    )
    if not benchmark.run(settings, out):
        raise typer.Exit(1)
