"""`everserve bench mask`: answers while experts are masked."""

from pathlib import Path
from typing import Annotated

import typer

from everserve_bench.cli.app import bench_app
from everserve_bench.cli.options import Out


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
    """What answers lose while experts are masked. By how many and which: held-out perplexity and an lm-eval task."""
    from everserve_bench import mask as benchmark  # noqa: PLC0415 (torch)

    settings = benchmark.Settings(num_tokens=tokens, num_questions=questions, num_draws=draws)
    benchmark.run(settings, text, out)
