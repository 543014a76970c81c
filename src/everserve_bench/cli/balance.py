"""`everserve bench balance`: skewed load."""

from typing import Annotated

import typer

from everserve.config.cluster import MAX_RANKS
from everserve_bench.cli.app import bench_app
from everserve_bench.cli.options import AttentionWorkers, Layers, Out, Prompt, Shape, Streams, Tokens, exit_unless


@bench_app.command()
def balance(
    shape: Shape = "bundled",
    layers: Layers = None,
    attention_workers: AttentionWorkers = 2,
    expert_workers: Annotated[int, typer.Option(help="Expert workers of the cluster.", min=2, max=MAX_RANKS)] = 4,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            help="Divide experts over so many devices instead, of which one is lost.", min=3, max=MAX_RANKS // 2
        ),
    ] = None,
    shadow_experts: Annotated[
        int | None, typer.Option(help="`--shadow-experts` of the server. Default: the server's.", min=0)
    ] = None,
    streams: Streams = 8,
    prompt: Prompt = 16,
    tokens: Tokens = 600,
    words: Annotated[int, typer.Option(help="Different tokens in all streams: the fewer, the more skew.", min=1)] = 4,
    seconds: Annotated[float, typer.Option(help="Seconds of load on each server.", min=5)] = 40.0,
    rounds: Annotated[int, typer.Option(help="Rounds, each with both servers.", min=1)] = 1,
    out: Out = None,
) -> None:
    """Skewed traffic with --enable-eplb and without. Load of the busiest worker, tokens/s and gaps while experts move.

    Exit status 1 if a stream was not exact, or nothing was moved.
    """
    from everserve_bench import balance as benchmark  # noqa: PLC0415 (torch)

    settings = benchmark.Settings(
        num_attention=attention_workers,
        num_expert=expert_workers,
        shadow_experts=shadow_experts,
        num_streams=streams,
        num_prompt=prompt,
        max_tokens=tokens,
        words=words,
        seconds=seconds,
        rounds=rounds,
        shape=shape,
        num_layers=layers,
        tensor_parallel=tensor_parallel,
    )
    exit_unless(benchmark.run(settings, out))
