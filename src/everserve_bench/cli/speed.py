"""`everserve bench engine`, `decode` and `speculation`: how fast one process is, against transformers, against the
memory, and without drafts."""

from typing import Annotated

import typer

from everserve_bench.cli.app import bench_app
from everserve_bench.cli.options import Out, Repetitions


@bench_app.command()
def engine(
    rounds: Repetitions = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Only the comparison with transformers generate.")] = False,
    out: Out = None,
) -> None:
    """One worker through HTTP against transformers. Tokens/s, latencies, distance from the memory floor."""
    from everserve_bench.micro import engine as benchmark  # noqa: PLC0415 (torch)

    benchmark.run(rounds, quick, out)


@bench_app.command()
def decode(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="mixtral, qwen3, llama, glm-air, gpt-oss, qwen2.5; repeatable. Default: the first two."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Use only this many of the shape's layers. With --shape.", min=1)
    ] = None,
    streams: Annotated[
        list[int] | None,
        typer.Option(help="Concurrent streams; repeatable. Default: 1, 16, 64, 128, 256.", min=1, max=256),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 512,
    baseline: Annotated[bool, typer.Option(help="Measure transformers too.")] = True,
    served: Annotated[bool, typer.Option("--served", help="Measure it through HTTP too.")] = False,
    launch_ahead: Annotated[
        bool, typer.Option(help="Measure steps that are launched ahead too, as a server does by itself.")
    ] = True,
    out: Out = None,
) -> None:
    """One process on a GPU, random weights. Time of a step against what its memory allows, and against transformers."""
    from everserve_bench.device_shapes import SHAPES  # noqa: PLC0415
    from everserve_bench.micro import decode as benchmark  # noqa: PLC0415 (torch)

    unknown = set(shape or ()) - set(SHAPES)
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose {' or '.join(SHAPES)}", param_hint="--shape")
    if layers is not None and not shape:
        raise typer.BadParameter("of which shape? Say --shape too", param_hint="--layers")
    defaults = benchmark.Settings()
    settings = benchmark.Settings(
        shapes=tuple((name, layers) for name in shape) if shape else defaults.shapes,
        batches=tuple(streams or defaults.batches),
        context=context,
        has_baseline=baseline,
        is_served=served,
        launch_ahead=launch_ahead,
    )
    benchmark.run(settings, out)


@bench_app.command()
def speculation(
    streams: Annotated[
        list[int] | None, typer.Option(help="Concurrent streams; repeatable. Default: 1, 4, 16, 64.", min=1, max=64)
    ] = None,
    rounds: Repetitions = 3,
    drafts: Annotated[int, typer.Option(help="Most drafts of a stream in a step.", min=1, max=64)] = 8,
    out: Out = None,
) -> None:
    """One engine with drafts beside one without: core time, on a CPU."""
    from everserve_bench.micro import speculation as benchmark  # noqa: PLC0415 (torch)

    benchmark.run(tuple(streams or (1, 4, 16, 64)), rounds, drafts, out)
