"""`everserve bench restore`: a lost stream goes on."""

from typing import Annotated

import typer

from everserve.cli.bench.app import bench_app
from everserve.cli.bench.options import Layers, Out, Repetitions, Shape, exit_unless


@bench_app.command()
def restore(
    shape: Shape = "bundled",
    layers: Layers = None,
    point: Annotated[
        list[int] | None, typer.Option(help="Tokens of the stream at its loss; repeatable.", min=33, max=8192)
    ] = None,
    most_sequential: Annotated[
        int | None,
        typer.Option(help="Longer streams are not computed token by token. Default: no limit; on a GPU 2048.", min=0),
    ] = None,
    rounds: Repetitions = 5,
    out: Out = None,
) -> None:
    """A lost stream goes on: from the log, by one prefill, or token by token, at several lengths.

    Exit status 1 if they did not all give the same next token.
    """
    from everserve.bench import restore as benchmark  # noqa: PLC0415 (torch)
    from everserve.bench.on_gpu import is_for_gpu  # noqa: PLC0415

    is_gpu = is_for_gpu(shape)
    if most_sequential is None and is_gpu:
        most_sequential = benchmark.GPU_MOST_SEQUENTIAL
    settings = benchmark.Settings(
        points=tuple(point or (benchmark.GPU_POINTS if is_gpu else benchmark.POINTS)),
        rounds=rounds,
        shape=shape,
        num_layers=layers,
        most_sequential=most_sequential,
    )
    exit_unless(benchmark.run(settings, out))
