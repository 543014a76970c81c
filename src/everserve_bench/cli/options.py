"""Options that several benchmarks have, each written once. Defaults are the benchmark's own."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from everserve.cli.files import check_directory
from everserve.config.cluster import MAX_RANKS
from everserve.provenance import LOCAL, check_out


def _check_out(path: Path | None) -> Path | None:
    """Fail before measuring, not after."""
    directory = path or LOCAL
    check_directory(directory, "--out")
    check_out(directory, "--out")
    return path


Out = Annotated[Path | None, typer.Option(help=f"Directory for the JSON. Default: {LOCAL}.", callback=_check_out)]

# -- the server ----------------------------------------------------------------------------------

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
AttentionWorkers = Annotated[int, typer.Option(help="Attention workers of the cluster.", min=1, max=MAX_RANKS)]
ExpertWorkers = Annotated[int, typer.Option(help="Expert workers of the cluster.", min=1, max=MAX_RANKS)]
AnyExpertWorkers = Annotated[int, typer.Option(help="Expert workers of the cluster; or 0.", min=0, max=MAX_RANKS)]
Serve = Annotated[str, typer.Option(help="More flags of the server, in one string: --serve '--detect-ms 100'.")]

# -- the load ------------------------------------------------------------------------------------

Streams = Annotated[int, typer.Option(help="Concurrent streams.", min=1, max=256)]
Prompt = Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)]
PromptOfDevice = Annotated[int | None, typer.Option(help="Tokens of each prompt. Default: 32; on a GPU 512.", min=1)]
Tokens = Annotated[int, typer.Option(help="Tokens of each stream; one that ends is started again.", min=16)]
FixedTokens = Annotated[int, typer.Option(help="Tokens of each stream.", min=16, max=4000)]

# -- how often -----------------------------------------------------------------------------------

Repetitions = Annotated[int, typer.Option(help="Repetitions, interleaved.", min=1)]
BaselineRounds = Annotated[int, typer.Option(help="Restarts of the whole instance.", min=0)]
WarmS = Annotated[float, typer.Option(help="Seconds of undisturbed streams before each fault.", min=0.5)]


def split_flags(serve: str) -> tuple[str, ...]:
    """The flags in `Serve`."""
    return tuple(shlex.split(serve))


def exit_unless(is_passed: bool) -> None:
    """Exit status 1 if a benchmark found that what it measures does not work."""
    if not is_passed:
        raise typer.Exit(1)
