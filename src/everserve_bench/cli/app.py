"""The group of commands that all benchmarks join."""

import typer

bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks, each with its baseline in the same run.")


@bench_app.callback()
def _bench() -> None:
    """Benchmarks, each with its baseline in the same run."""
