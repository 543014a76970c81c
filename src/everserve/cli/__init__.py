"""The command line, one file per command.

app.py      the command that all of these are commands of
serve.py    serve a model (serve_settings.py what it is started with, flags.py flags that are fields of configs,
            config_file.py flags from a file, foreign_flags.py flags of vLLM that are not here)
model_files.py where a model's files are, and whether they can be served (hub.py names of the Hugging Face hub)
starting.py bars while it starts
agent.py    join an instance from another host
devices.py  what it is served on
files.py    files that flags name, looked at before anything long begins
address.py  the server that --url names, and its keys
following.py progress of a change until it is done
demo.py     streams and deaths in one terminal (demo_run.py what happens, demo_screen.py what is shown)
status.py   the workers, and whether the instance is valid
watch.py    ... as it changes (`status --watch`)
kill.py     send a signal to a process
drain.py    have workers leave in order, and be replaced
scale.py    have more or fewer workers
health.py   how healthy devices are
switch.py   give a worker another role
upgrade.py  go on with another installed version (compatibility.py what both must have in common)
chaos.py    the stream checker (the checker itself is in everserve.chaos)
simulate.py a fleet in virtual time (the simulation itself is in everserve.simulate)
bench.py    benchmarks by name, if they are installed (everserve_bench)
version.py  print the version (`everserve version`, `everserve --version`)
"""

import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from everserve.errors import UserError
from everserve.procs import early_zygote
from everserve.procs.bytecode import keep_bytecode

if TYPE_CHECKING:
    from everserve.procs.root_end import RootEnd

_COMMANDS = (
    "agent",
    "bench",
    "chaos",
    "demo",
    "drain",
    "health",
    "kill",
    "scale",
    "serve",
    "simulate",
    "status",
    "switch",
    "upgrade",
    "version",
)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """What Ctrl-C would do just now: asyncio cancels what it runs, a storm of faults ends with its verdict."""
    signal.raise_signal(signal.SIGINT)


def _handle_signals() -> None:
    """SIGINT ends a command, also one that a shell started in the background, where it is ignored at first. SIGTERM,
    and SIGHUP when the terminal is gone, do the same: a command that has a server of its own must not leave it behind.
    `serve` handles its signals itself, once its supervisor runs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, _interrupt)


def main() -> None:
    """Entry point. A user's mistake is one line and exit status 2; our mistake is a traceback."""
    _handle_signals()
    try:
        if early_zygote.is_needed(sys.argv[1:]):
            keep_bytecode()
            early_zygote.begin()
            from everserve.procs import root  # noqa: PLC0415 (the zygote's imports are the longest part of a start)

            sys.exit(root.run(_first_supervisor))
        sys.exit(_command())
    except KeyboardInterrupt:  # so early that root does not handle signals; the kernel ends the zygote
        sys.exit(128 + signal.SIGINT)


def _first_supervisor(to_root: "RootEnd") -> int:
    """The command itself runs in the process that becomes the supervisor."""
    from everserve.procs import root_end  # noqa: PLC0415

    root_end.here = to_root
    return _command()


def _command() -> int:
    """Run it; returns its exit status."""
    try:
        _run(sys.argv[1:2])
    except UserError as error:
        from everserve.procs import logs  # noqa: PLC0415

        logs.refuse(str(error))
        return 2
    except KeyboardInterrupt:  # so early that typer has not seen it
        return 128 + signal.SIGINT
    except SystemExit as end:  # which typer raises
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def _run(asked: Sequence[str]) -> None:
    """Each module registers its command, or its commands. Importing all of them takes longer than most commands do: if
    the first argument is the name of one, only that one is imported. (version.py also has the options of all.)"""
    from everserve.cli.app import app  # noqa: PLC0415 (typer: what is started early should not wait for it)

    names = ("version", *asked) if set(asked) & set(_COMMANDS) else _COMMANDS
    for name in names:
        importlib.import_module(f"everserve.cli.{name}")
    app()
