"""`everserve bench show` and `publish`: results that were written before."""

from pathlib import Path
from typing import Annotated

import typer

from everserve_bench.cli.app import bench_app


@bench_app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="JSON files of earlier benchmarks.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown tables.")] = False,
) -> None:
    """Print the tables of earlier results."""
    from everserve_bench import show as shower  # noqa: PLC0415 (torch)

    shower.show(files, markdown)


@bench_app.command()
def publish(
    files: Annotated[list[Path] | None, typer.Argument(help="JSON files that benchmarks wrote.")] = None,
    folder: Annotated[str, typer.Option("--to", help="Folder in bench/results for them: gpu.")] = "",
) -> None:
    """Keep what documents cite of results.

    Puts that into bench/results, and the figures into the documents. A result must have been measured from the sources
    of a commit. Without files: once more what is there.
    """
    from everserve_bench import publish as publisher  # noqa: PLC0415 (other commands do not need it)

    publisher.publish(files or [], folder)
