"""The command line, one file per command.

app.py      the command that all of these are commands of
serve.py    serve a model (serve_settings.py what it is started with, flags.py flags that are fields of configs,
            config_file.py flags from a file)
starting.py bars while it starts
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
chaos.py    the stream checker (the checker itself is in everserve.chaos)
bench/      one benchmark by name (the benchmarks themselves are in everserve.bench)
version.py  print the version (`everserve version`, `everserve --version`)
"""

import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from everserve.errors import UserError
from everserve.procs.bytecode import keep_bytecode
from everserve.procs.early_zygote import early_zygote, is_needed

_COMMANDS = ("bench", "chaos", "demo", "drain", "health", "kill", "scale", "serve", "status", "switch", "version")


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
    try:
        _handle_signals()
        if is_needed(sys.argv[1:]):
            keep_bytecode()
        with early_zygote(sys.argv[1:]):
            _run(sys.argv[1:2])
    except UserError as error:
        print(f"everserve: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # so early that typer has not seen it
        sys.exit(128 + signal.SIGINT)


def _run(asked: Sequence[str]) -> None:
    """Each module registers its command, or its commands. Importing all of them takes longer than most commands do: if
    the first argument is the name of one, only that one is imported. (version.py also has the options of all.)"""
    from everserve.cli.app import app  # noqa: PLC0415 (typer: what is started early should not wait for it)

    names = ("version", *asked) if set(asked) & set(_COMMANDS) else _COMMANDS
    for name in names:
        importlib.import_module(f"everserve.cli.{name}")
    app()
