"""`everserve version`."""

from typing import Annotated

import typer

from everserve import __version__
from everserve.cli.app import app


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _print_and_exit(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def everserve(
    is_version_asked: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_and_exit, is_eager=True)
    ] = False,
) -> None:
    """LLM serving that keeps every token stream going when workers die."""
