"""`everserve version`."""

import typer

from everserve import __version__
from everserve.cli import app


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
