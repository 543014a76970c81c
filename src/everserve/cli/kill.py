"""`everserve kill RANK`: send a signal to a worker, or to another process, to see that clients do not notice.
`everserve kill --device D`, `--host H`: lose a device or a host. `everserve return`: it may be used again."""

from typing import Annotated

import typer

from everserve.cli.address import DEFAULT_URL, AdminKey, ApiKey, Url
from everserve.cli.app import app
from everserve.cli.status import administer
from everserve.errors import ConfigError
from everserve.words import agree, plural

_FAULTS = {"HANG": "a hang", "FLIP": "a flipped bit"}  # which are no signals
_SIGNALS = ("KILL", "STOP", "CONT", "TERM", "HANG", "FLIP")


@app.command()
def kill(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="RANK",
            help="Rank of a worker, or gateway, keeper, supervisor, orchestrator, anchor, zygote or carrier; of several"
            " gateways also gateway-1, keeper-1 ...",
        ),
    ] = None,
    signal: Annotated[
        str,
        typer.Option(
            help="KILL, STOP, CONT, TERM; HANG: a worker's main thread hangs; FLIP: an expert worker computes one bit"
            " of each row wrong."
        ),
    ] = "KILL",
    device: Annotated[
        int | None, typer.Option(help="Lose a device instead: its workers, and everything in its memory.", min=0)
    ] = None,
    host: Annotated[
        int | None, typer.Option(help="Lose a host instead: its workers, and all their memory.", min=1)
    ] = None,
    gone: Annotated[
        bool, typer.Option("--gone", help="The device or host does not come back before `everserve return`.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Inject a fault: signal a process, or lose a device or a host. The server must run with --enable-chaos."""
    if [target, device, host].count(None) != 2:
        raise ConfigError("kill: name one RANK, --device or --host")
    if gone and target is not None:
        raise ConfigError("--gone: only a --device or a --host can be gone")
    if target is None:
        what, number = ("device", device) if device is not None else ("host", host)
        lost = administer(f"{url}/cluster/fault", admin_key, api_key, {what: number, "gone": gone})
        typer.echo(f"{what} {number} is {'gone' if gone else 'lost'} with {_ranks(lost['ranks'])}")
        return
    name = signal.upper().removeprefix("SIG")
    if name not in _SIGNALS:
        raise ConfigError(f"--signal {signal}: choose one of {', '.join(_SIGNALS)}")
    if target.isdigit():
        sent = administer(f"{url}/cluster/fault", admin_key, api_key, {"rank": int(target), "signal": name})
        what = _FAULTS.get(name, f"SIG{name}")
        typer.echo(f"sent {what} to rank {target} (incarnation {sent['incarnation']}, pid {sent['pid']})")
    else:
        sent = administer(f"{url}/cluster/fault", admin_key, api_key, {"process": target, "signal": name})
        typer.echo(f"sent SIG{name} to the {target} (pid {sent['pid']})")


@app.command(name="return")
def return_device(
    device: Annotated[int | None, typer.Argument(help="A device that is gone: see `everserve status`.", min=0)] = None,
    host: Annotated[int | None, typer.Option(help="Instead: a host that is gone. It may join again.", min=1)] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Use a device again that was gone, or a host. Workers start on it."""
    if (device is None) == (host is None):
        raise ConfigError("return: name either a DEVICE or a --host")
    if host is not None:
        administer(f"{url}/cluster/return", admin_key, api_key, {"host": host})
        typer.echo(f"host {host} may join again: its agent tries to every moment")
        return
    back = administer(f"{url}/cluster/return", admin_key, api_key, {"device": device})
    ranks = back["ranks"]
    there = f"{_ranks(ranks)} {agree('start', len(ranks))}"
    typer.echo(f"device {device} is back: {there if ranks else 'no worker should be on it, see `everserve scale`'}")


def _ranks(ranks: list[int]) -> str:
    return f"{plural('rank', len(ranks))} {', '.join(map(str, ranks))}"
