"""Follow a change of the cluster until it is done."""

import time
from collections.abc import Callable

import typer

from everserve.errors import ConfigError

_LOOK_EVERY_S = 0.1


def follow(look: Callable[[], str | None], began_s: float, timeout_s: float) -> None:
    """`look` says how far the change is, or None when it is done. What it says is printed when it changes."""
    said = ""
    while True:
        now = look()
        took_s = time.monotonic() - began_s
        if now is None:
            typer.echo(f"done after {took_s:.1f} s")
            return
        if now != said:
            said = now
            typer.echo(f"{took_s:6.1f} s  {now}")
        if took_s > timeout_s:
            raise ConfigError(f"not done after {timeout_s:g} s, and still going on: see `everserve status`")
        time.sleep(_LOOK_EVERY_S)
