"""`everserve bench overhead` and `checkpoint`: what protections cost when nothing fails."""

from typing import Annotated

import typer

from everserve.cli.bench.app import bench_app
from everserve.cli.bench.options import FixedTokens, Layers, Out, PromptOfDevice, Shape, exit_unless


@bench_app.command()
def overhead(
    shape: Shape = "bundled",
    layers: Layers = None,
    streams: Annotated[
        list[int] | None, typer.Option(help="Concurrent streams; repeatable. Default: 8 and 1; on a GPU 64.", min=1)
    ] = None,
    prompt: PromptOfDevice = None,
    tokens: FixedTokens = 192,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds, each with all variants in random order. Default: 15; on a GPU 3.", min=1)
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Only these variants; repeatable. Default: all. Names as in the table.")
    ] = None,
    out: Out = None,
) -> None:
    """What each protection costs when nothing fails: one process, 1+1, 2+2, and 2+2 without each of them.

    Exit status 1 if variants answered different tokens.
    """
    from everserve.bench import overhead as benchmark  # noqa: PLC0415 (torch)
    from everserve.bench.on_gpu import is_for_gpu  # noqa: PLC0415

    is_gpu = is_for_gpu(shape)
    settings = benchmark.Settings(
        streams=tuple(streams or ((64,) if is_gpu else (8, 1))),
        prompt=prompt or (512 if is_gpu else 32),
        max_tokens=tokens,
        rounds=rounds or (3 if is_gpu else 15),
        shape=shape,
        num_layers=layers,
        variants=tuple(variant or benchmark.variants_of(shape)),
    )
    exit_unless(benchmark.run(settings, out))


@bench_app.command()
def checkpoint(
    shape: Shape = "bundled",
    layers: Layers = None,
    streams: Annotated[
        list[int] | None, typer.Option(help="Concurrent streams; repeatable. Default: 8; on a GPU 64.", min=1)
    ] = None,
    prompt: PromptOfDevice = None,
    tokens: FixedTokens = 384,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds, each with all variants in random order. Default: 12; on a GPU 3.", min=1)
    ] = None,
    out: Out = None,
) -> None:
    """What the KV log costs when nothing fails: off, mirror and anchor.

    Exit status 1 if variants answered different tokens.
    """
    from everserve.bench import checkpoint as benchmark  # noqa: PLC0415 (torch)
    from everserve.bench.on_gpu import is_for_gpu  # noqa: PLC0415
    from everserve.bench.variants import Settings  # noqa: PLC0415

    is_gpu = is_for_gpu(shape)
    settings = Settings(
        streams=tuple(streams or ((64,) if is_gpu else (8,))),
        prompt=prompt or (512 if is_gpu else 32),
        max_tokens=tokens,
        rounds=rounds or (3 if is_gpu else 12),
        shape=shape,
        num_layers=layers,
    )
    exit_unless(benchmark.run(settings, out))
