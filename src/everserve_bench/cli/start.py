"""`everserve bench start`: from the command to the first token."""

from typing import Annotated

import typer

from everserve_bench.cli.app import bench_app
from everserve_bench.cli.options import (
    AnyExpertWorkers,
    AttentionWorkers,
    Layers,
    Out,
    Prompt,
    Repetitions,
    Serve,
    Shape,
    exit_unless,
    split_flags,
)


@bench_app.command()
def start(
    attention_workers: AttentionWorkers = 2,
    expert_workers: AnyExpertWorkers = 2,
    streams: Annotated[int, typer.Option(help="The server gets room for so many streams.", min=1, max=256)] = 64,
    prompt: Prompt = 32,
    shape: Shape = "bundled",
    layers: Layers = None,
    cold: Annotated[
        bool, typer.Option(help="On a GPU also the first start, with no kernels compiled; it takes a minute.")
    ] = True,
    rounds: Repetitions = 3,
    serve: Serve = "",
    out: Out = None,
) -> None:
    """A server from the command to its first token. How long, and what takes that long."""
    from everserve_bench.micro import start as benchmark  # noqa: PLC0415 (torch)

    settings = benchmark.Settings(
        rounds=rounds,
        num_attention=attention_workers,
        num_expert=expert_workers,
        num_streams=streams,
        num_prompt=prompt,
        is_cold=cold,
        shape=shape,
        num_layers=layers,
        serve=split_flags(serve),
    )
    exit_unless(benchmark.run(settings, out))
