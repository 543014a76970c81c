"""`everserve upgrade`: the running instance goes on with another installed version, worker by worker."""

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from everserve.cli.address import DEFAULT_URL, AdminKey, ApiKey, Url
from everserve.cli.app import app
from everserve.cli.drain import restart_each
from everserve.cli.status import administer
from everserve.errors import ConfigError
from everserve.procs.upgrading import CONFIRM_S
from everserve.words import count

_ANSWER_S = 150.0  # both versions import all that they are made of, on a machine that is busy serving
_LOOK_EVERY_S = 0.2


@app.command()
def upgrade(
    to: Annotated[
        str, typer.Option(help="The Python interpreter that the other version is installed for; this one, if left out.")
    ] = sys.executable,
    wait: Annotated[float, typer.Option(help="Seconds to wait for each new worker to be ready.", min=1)] = 120.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Go on with another version, while streams run. A version that does not fit is refused, and one whose processes do
    not start gives way to the one before. Gateways follow one after the other, with all connections."""

    def change(python: str | None) -> dict[str, Any]:
        return administer(f"{url}/cluster/upgrade", admin_key, api_key, {"python": python}, _ANSWER_S)

    python = str(Path(to).absolute())
    before = change(python)
    _wait_until_used(change, python)
    typer.echo(f"version {before['version']} goes on")
    _wait_for_gateways(change, wait)
    try:
        restart_each(url, admin_key, api_key or admin_key, api_key, None, wait)
    except ConfigError as error:
        change(before["python"])
        raise ConfigError(f"{error}; {before['python']} goes on as before") from error
    typer.echo("every process is of this version")


def _wait_for_gateways(change: Callable[[str | None], dict[str, Any]], wait_s: float) -> None:
    """They need no worker, and follow from the moment that the other version has taken over."""
    until_s = time.monotonic() + wait_s
    while True:
        with contextlib.suppress(ConfigError):  # one of them is being followed
            if not (left := change(None)["gateways_left"]):
                return
            if time.monotonic() > until_s:
                raise ConfigError(f"{count(left, 'gateway')} could not be followed: see the server's log")
        if time.monotonic() > until_s + _ANSWER_S:
            raise ConfigError("the server does not answer")
        time.sleep(_LOOK_EVERY_S)


def _wait_until_used(change: Callable[[str | None], dict[str, Any]], python: str) -> None:
    """The other version has taken over: its processes have started, and understand what they are told."""
    until_s = time.monotonic() + CONFIRM_S + _ANSWER_S
    while True:
        try:
            used = change(None)["python"]
        except ConfigError:  # it is still taking over
            used = None
        if used == python:
            return
        if used is not None or time.monotonic() > until_s:
            raise ConfigError(f"{python} could not take over, and the version before goes on: see the server's log")
        time.sleep(_LOOK_EVERY_S)
