"""The command that all others are commands of."""

import typer

app = typer.Typer(
    name="everserve",
    help="LLM serving that keeps every token stream going when workers die.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
