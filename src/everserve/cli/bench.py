"""`everserve bench NAME`: one benchmark; prints a table and writes JSON."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from everserve.cli import app
from everserve.cli.files import check_directory
from everserve.config.cluster import MAX_RANKS

bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks, each with its baseline in the same run.")
app.add_typer(bench_app, name="bench")


def _check_out(path: Path | None) -> Path | None:
    """Fail before measuring, not after."""
    check_directory(path or Path("bench/results"), "--out")
    return path


Out = Annotated[Path | None, typer.Option(help="Directory for the JSON. Default: bench/results.", callback=_check_out)]
Shape = Annotated[
    str,
    typer.Option(
        help="bundled; with random weights small-llama, small-mixtral, small-qwen3, small-moe; on a GPU mixtral, qwen3,"
        " llama, llama-70b, qwen3-dense."
    ),
]
Layers = Annotated[int | None, typer.Option(help="Use only this many of the shape's layers.", min=1)]
Spares = Annotated[int | None, typer.Option(help="`--spares` of the server. Default: the server's.", min=0, max=8)]
KvLog = Annotated[str | None, typer.Option(help="`--kv-log` of the server. Default: the server's.")]


@bench_app.callback()
def _bench() -> None:
    """Benchmarks, each with its baseline in the same run."""


@bench_app.command()
def engine(
    rounds: Annotated[int, typer.Option(help="Repetitions, interleaved.", min=1)] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Only the comparison with transformers generate.")] = False,
    out: Out = None,
) -> None:
    """One worker through HTTP against transformers: tokens/s, latencies, distance from the memory floor."""
    from everserve.bench import engine as benchmark  # noqa: PLC0415 (torch)

    benchmark.run(rounds, quick, out)


@bench_app.command()
def decode(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="mixtral, qwen3, llama; repeatable. Default: the first two, mixtral with 16 layers."),
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
    out: Out = None,
) -> None:
    """One process on a GPU, random weights: time of a step against what its memory allows, and against transformers."""
    from everserve.bench import decode as benchmark  # noqa: PLC0415 (torch)
    from everserve.bench.device_shapes import SHAPES  # noqa: PLC0415

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
    )
    benchmark.run(settings, out)


@bench_app.command()
def failover(
    attention_workers: Annotated[int, typer.Option(help="Attention workers of the cluster.", min=1, max=MAX_RANKS)] = 2,
    expert_workers: Annotated[
        int, typer.Option(help="Expert workers of the cluster; 0 for a dense model.", min=0, max=MAX_RANKS)
    ] = 2,
    streams: Annotated[int, typer.Option(help="Concurrent streams.", min=1, max=256)] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream; one that ends is started again.", min=16)] = 1500,
    shape: Shape = "bundled",
    layers: Layers = None,
    spares: Spares = None,
    kv_log: KvLog = None,
    rounds: Annotated[int, typer.Option(help="Kills of each kind, in turn.", min=1)] = 5,
    baseline_rounds: Annotated[int, typer.Option(help="Restarts of the whole instance.", min=0)] = 2,
    warm_s: Annotated[float, typer.Option(help="Seconds of undisturbed streams before each kill.", min=1)] = 3.0,
    out: Out = None,
) -> None:
    """A worker is killed under running streams: gaps, tokens lost, time to full strength; beside it, a full restart.

    Exit status 1 if a stream lost a token or got a different one, or if on a GPU a death took another worker along.
    """
    from everserve.bench import failover as benchmark  # noqa: PLC0415 (torch)

    settings = benchmark.Settings(
        num_attention=attention_workers,
        num_expert=expert_workers,
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
    )
    if not benchmark.run(settings, out):
        raise typer.Exit(1)


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
    streams: Annotated[int, typer.Option(help="Concurrent streams.", min=1, max=256)] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream; one that ends is started again.", min=16)] = 1500,
    shape: Shape = "bundled",
    layers: Layers = None,
    spares: Spares = None,
    kv_log: Annotated[
        str, typer.Option(help="`--kv-log` of the server. A mirror outlives a device, an anchor only processes.")
    ] = "mirror",
    serve: Annotated[
        str, typer.Option(help="More flags of the server, in one string: --serve '--detect-ms 100'.")
    ] = "",
    rounds: Annotated[int, typer.Option(help="Losses in each case.", min=1)] = 3,
    baseline_rounds: Annotated[int, typer.Option(help="Restarts of the whole instance.", min=0)] = 1,
    warm_s: Annotated[float, typer.Option(help="Seconds of undisturbed streams before each loss.", min=1)] = 3.0,
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
        serve=tuple(shlex.split(serve)),
    )
    if not benchmark.run(settings, out):
        raise typer.Exit(1)


@bench_app.command()
def scaling(
    shape: Shape = "bundled",
    layers: Layers = None,
    streams: Annotated[
        list[int] | None,
        typer.Option(help="Concurrent streams; repeatable. Default: 16, 64, 256; bundled: 4, 16.", min=1, max=256),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of each prompt; repeatable. Default: 512, 2048, 8192; bundled: 128, 1024.", min=1),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of each stream, not counting those it gets while other prompts are computed.", min=16
        ),
    ] = 400,
    most_tokens: Annotated[
        int, typer.Option(help="Leave out points of the grid whose prompts have more tokens in all.", min=1)
    ] = 600_000,
    attention_workers: Annotated[int, typer.Option(help="Attention workers of the cluster.", min=1, max=MAX_RANKS)] = 2,
    expert_workers: Annotated[int, typer.Option(help="Expert workers of the cluster.", min=1, max=MAX_RANKS)] = 2,
    spares: Spares = None,
    kv_log: KvLog = None,
    rounds: Annotated[int, typer.Option(help="Kills of each kind at each point of the grid.", min=1)] = 2,
    warm_s: Annotated[float, typer.Option(help="Seconds of undisturbed streams before each kill.", min=1)] = 2.0,
    out: Out = None,
) -> None:
    """How recovery grows with the number of running streams and the length of their prompts.

    Exit status 1 if a stream was not exact or a kill could not be measured, or if on a GPU a death took another worker
    along. Cells that do not fit are shown as such.
    """
    from everserve.bench import scaling as benchmark  # noqa: PLC0415 (torch)
    from everserve.bench.grid import scale_of  # noqa: PLC0415

    default = scale_of(shape)
    settings = benchmark.Settings(
        num_attention=attention_workers,
        num_expert=expert_workers,
        streams=tuple(streams or default.streams),
        contexts=tuple(context or default.contexts),
        max_tokens=tokens,
        most_tokens=most_tokens,
        rounds=rounds,
        warm_s=warm_s,
        shape=shape,
        num_layers=layers,
        spares=spares,
        kv_log=kv_log,
    )
    if not benchmark.run(settings, out):
        raise typer.Exit(1)


@bench_app.command()
def scale(
    sizes: Annotated[
        str, typer.Option(help="Numbers of devices, one after the other; each has an attention and an expert worker.")
    ] = "2,4,8,3",
    streams: Annotated[int, typer.Option(help="Concurrent streams.", min=1, max=256)] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream; one that ends is started again.", min=16)] = 400,
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
    if not benchmark.run(settings, out):
        raise typer.Exit(1)


@bench_app.command()
def grey(
    streams: Annotated[int, typer.Option(help="Concurrent streams.", min=1, max=256)] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream; one that ends is started again.", min=16)] = 400,
    seconds: Annotated[float, typer.Option(help="How long a worker is slow, in each case.", min=3)] = 20.0,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Only these cases, by parts of their names; repeatable: expert, stopped 80."),
    ] = None,
    quiet: Annotated[
        float, typer.Option(help="Instead: busy neighbours for so many seconds; counts false alarms.", min=0)
    ] = 0.0,
    out: Out = None,
) -> None:
    """One of 2+3 workers is slow: how soon that is found, and times between tokens with and without.

    Exit status 1 if a stream lost a token or got a different one; with --quiet, also if a worker was accused.
    """
    from everserve.bench import grey as benchmark  # noqa: PLC0415 (torch)

    cases = tuple(one for one in benchmark.CASES if not case or any(part in str(one) for part in case))
    if not cases:
        raise typer.BadParameter("no case has such a name", param_hint="--case")
    settings = benchmark.Settings(
        num_streams=streams, max_tokens=tokens, disturbed_s=seconds, quiet_s=quiet, cases=cases
    )
    if not benchmark.run(settings, out):
        raise typer.Exit(1)


@bench_app.command()
def overhead(
    shape: Shape = "bundled",
    layers: Layers = None,
    streams: Annotated[
        list[int] | None, typer.Option(help="Concurrent streams; repeatable. Default: 8 and 1; on a GPU 64.", min=1)
    ] = None,
    prompt: Annotated[int | None, typer.Option(help="Tokens of each prompt. Default: 32; on a GPU 512.", min=1)] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream.", min=16, max=4000)] = 192,
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
    if not benchmark.run(settings, out):
        raise typer.Exit(1)


@bench_app.command()
def checkpoint(
    shape: Shape = "bundled",
    layers: Layers = None,
    streams: Annotated[
        list[int] | None, typer.Option(help="Concurrent streams; repeatable. Default: 8; on a GPU 64.", min=1)
    ] = None,
    prompt: Annotated[int | None, typer.Option(help="Tokens of each prompt. Default: 32; on a GPU 512.", min=1)] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream.", min=16, max=4000)] = 384,
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
    if not benchmark.run(settings, out):
        raise typer.Exit(1)


@bench_app.command()
def balance(
    shape: Shape = "bundled",
    layers: Layers = None,
    attention_workers: Annotated[int, typer.Option(help="Attention workers of the cluster.", min=1, max=MAX_RANKS)] = 2,
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
    streams: Annotated[int, typer.Option(help="Concurrent streams.", min=1, max=256)] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream; one that ends is started again.", min=16)] = 600,
    words: Annotated[int, typer.Option(help="Different tokens in all streams: the fewer, the more skew.", min=1)] = 4,
    seconds: Annotated[float, typer.Option(help="Seconds of load on each server.", min=5)] = 40.0,
    rounds: Annotated[int, typer.Option(help="Rounds, each with both servers.", min=1)] = 1,
    out: Out = None,
) -> None:
    """Skewed traffic with --enable-eplb and without: load of the busiest worker, tokens/s and gaps while experts move.

    Exit status 1 if a stream was not exact, or nothing was moved.
    """
    from everserve.bench import balance as benchmark  # noqa: PLC0415 (torch)

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
    if not benchmark.run(settings, out):
        raise typer.Exit(1)


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
    rounds: Annotated[int, typer.Option(help="Repetitions, interleaved.", min=1)] = 5,
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
    if not benchmark.run(settings, out):
        raise typer.Exit(1)


@bench_app.command()
def mask(
    tokens: Annotated[int, typer.Option(help="Held-out tokens to predict.", min=512)] = 16_384,
    questions: Annotated[int, typer.Option(help="Questions of the lm-eval task; 0: none.", min=0)] = 200,
    draws: Annotated[int, typer.Option(help="How often experts are drawn at random.", min=1)] = 3,
    text: Annotated[
        Path | None, typer.Option(help="Another text than the held-out one.", exists=True, dir_okay=False)
    ] = None,
    out: Out = None,
) -> None:
    """What answers lose while experts are masked, by how many and which: held-out perplexity and an lm-eval task."""
    from everserve.bench import mask as benchmark  # noqa: PLC0415 (torch)

    settings = benchmark.Settings(num_tokens=tokens, num_questions=questions, num_draws=draws)
    benchmark.run(settings, text, out)


@bench_app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="JSON files of earlier benchmarks.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown tables.")] = False,
) -> None:
    """Print the tables of earlier results."""
    from everserve.bench import show as shower  # noqa: PLC0415 (torch)

    shower.show(files, markdown)
