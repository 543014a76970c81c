"""`everserve bench show`: results that were written before."""

from pathlib import Path
from typing import Annotated

import typer

from everserve.cli.bench.app import bench_app


@bench_app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="JSON files of earlier benchmarks.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown tables.")] = False,
) -> None:
    """Print the tables of earlier results."""
    from everserve.bench import show as shower  # noqa: PLC0415 (torch)

    shower.show(files, markdown)
