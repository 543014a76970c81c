"""`everserve bench degree` and `everserve bench prefill`: dividing a model over devices, and prompts over homes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from everserve.config.cluster import MAX_RANKS
from everserve_bench.cli.app import bench_app
from everserve_bench.cli.options import Layers, Out, PromptOfDevice, Shape, exit_unless


@bench_app.command()
def degree(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="small-llama, small-mixtral, small-qwen3, small-moe; on a GPU mixtral, llama, llama-70b, qwen3,"
            " qwen3-dense; repeatable. Default: the first two."
        ),
    ] = None,
    layers: Layers = None,
    sizes: Annotated[str, typer.Option(help="Numbers of devices; 1 must be among them.")] = "8,7,6,5,4,3,2,1",
    streams: Annotated[int | None, typer.Option(help="Concurrent streams. Default: 8; on a GPU 64.", min=1)] = None,
    prompt: PromptOfDevice = None,
    tokens: Annotated[int | None, typer.Option(help="Of each stream. Default: 48; on a GPU 192.", min=16)] = None,
    slices: Annotated[int, typer.Option(help="Measurements of each size.", min=1)] = 2,
    out: Out = None,
) -> None:
    """One model on 8, 7, 6 and fewer devices. Tokens/s, time between tokens and core time against one process; and as
    planned, against other placements: work and memory of the busiest device, KV tokens that fit.

    Exit status 1 if a token differs between sizes, or a size could not be measured.
    """
    from everserve_bench import degree as benchmark  # noqa: PLC0415 (torch)
    from everserve_bench.subject import is_for_gpu  # noqa: PLC0415

    numbers = [int(text) if text.strip().isdecimal() else 0 for text in sizes.split(",")]
    if min(numbers) < 1 or 2 * max(numbers) > MAX_RANKS:
        raise typer.BadParameter(f"numbers from 1 to {MAX_RANKS // 2}: 8,7,4,1", param_hint="--sizes")
    shapes = tuple(shape or ("small-llama", "small-mixtral"))
    is_gpu = any(map(is_for_gpu, shapes))
    settings = benchmark.Settings(
        shapes=shapes,
        sizes=tuple(dict.fromkeys(numbers)),
        num_streams=streams or (64 if is_gpu else 8),
        prompt=prompt or (512 if is_gpu else 32),
        max_tokens=tokens or (192 if is_gpu else 48),
        slices=slices,
        num_layers=layers,
    )
    exit_unless(benchmark.run(settings, out))


@bench_app.command()
def prefill(
    trace: Annotated[
        list[str] | None,
        typer.Option(help="Whose lengths: mooncake-conv, azure-conv, azure-code; repeatable. Default: the first two."),
    ] = None,
    homes: Annotated[int, typer.Option(help="`-tp` of the server.", min=2, max=MAX_RANKS // 2)] = 3,
    mean_prompt: Annotated[
        int | None, typer.Option(help="Prompts are scaled to so many tokens on average. Default: 192; on a GPU 4096.")
    ] = None,
    load: Annotated[
        float, typer.Option(help="Rate of requests, over what the server computes in a burst.", min=0.05, max=2)
    ] = 0.7,
    seconds: Annotated[float, typer.Option(help="Of each trace on each server in each round.", min=1)] = 12.0,
    rounds: Annotated[int, typer.Option(help="Rounds, each with both servers.", min=1)] = 2,
    alone: Annotated[
        bool, typer.Option("--alone", help="Only one engine alone, without servers; the options below are for that.")
    ] = False,
    point: Annotated[
        list[str] | None,
        typer.Option(help="512x64: 64 prompts of 512 tokens; repeatable. Default: some of each length."),
    ] = None,
    step_tokens: Annotated[
        list[int] | None, typer.Option(help="Most tokens of a step; repeatable. Default: the server's.", min=16)
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="On a GPU: time per kernel of a full step too.")] = False,
    beside: Annotated[bool, typer.Option("--beside", help="Prompts beside streams that decode too.")] = False,
    shape: Shape = "bundled",
    layers: Layers = None,
    out: Out = None,
) -> None:
    """Prompts of very different lengths on several homes. Time to first token, and how even work is; the same on paper
    against streams in turn and tokens as they come; and one engine alone against measured limits.

    Exit status 1 if a request did not finish.
    """
    from everserve_bench import prefill as benchmark  # noqa: PLC0415 (torch)
    from everserve_bench.subject import is_for_gpu  # noqa: PLC0415

    is_gpu = is_for_gpu(shape)
    if alone:
        points = tuple(map(_parse_point, point or _points(is_gpu)))
        _prefill_alone(out, shape=shape, num_layers=layers, points=points, step_tokens=tuple(step_tokens or ()),
            profiled=profile, beside=beside)  # fmt: skip
        return
    prompts = (512, 2048, 8192) if is_gpu else (32, 128, 512, 1024)
    settings = benchmark.Settings(
        traces=tuple(trace or ("mooncake-conv", "azure-conv")),
        num_homes=homes,
        mean_prompt=mean_prompt or (4096 if is_gpu else 192),
        max_prompt=32_768 if is_gpu else 2048,
        load=load,
        seconds=seconds,
        rounds=rounds,
        shape=shape,
        points=tuple((prompt, batch) for prompt in prompts for batch in (1, 4)),
        num_layers=layers,
    )
    exit_unless(benchmark.run(settings, out))


def _points(is_gpu: bool) -> list[str]:
    if is_gpu:
        return ["512x16", "512x64", "2048x1", "2048x16", "8192x1", "8192x4"]
    return ["32x4", "128x1", "128x4", "512x1", "512x4"]


def _prefill_alone(out: Path | None, **settings: Any) -> None:
    from everserve_bench.micro import prefill_alone as benchmark  # noqa: PLC0415 (torch)

    benchmark.run(benchmark.Settings(**settings), out)


def _parse_point(text: str) -> tuple[int, int]:
    prompt, _, batch = text.partition("x")
    if not (prompt.isdecimal() and batch.isdecimal() and int(prompt) and int(batch)):
        raise typer.BadParameter(f"{text}: tokens of a prompt, x, and how many prompts: 512x64", param_hint="--point")
    return int(prompt), int(batch)
