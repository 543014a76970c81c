"""What `everserve --help` lists, in a terminal of 80 columns."""

import importlib
import sys

import pytest
import typer
from typer.testing import CliRunner

from everserve.cli import _COMMANDS
from everserve.cli.app import app
from everserve.errors import ConfigError


@pytest.mark.parametrize("group", ["", "bench"])
def test_the_line_of_each_command_is_whole(group: str):
    for name in _COMMANDS:
        importlib.import_module(f"everserve.cli.{name}")
    shown = CliRunner().invoke(app, [*group.split(), "--help"], terminal_width=80).stdout
    listed = shown.partition("Commands:\n")[2].strip().splitlines()
    assert len(listed) > 10
    for line in listed:
        assert len(line.split()) > 2 and line.endswith("."), f"not on one line: {line}"
        assert not line.endswith("..") and len(line) <= 80, f"cut: {line}"


def test_without_the_package_of_benchmarks_one_line_says_so(monkeypatch):
    import everserve.cli.bench as command  # noqa: PLC0415 (as it is with them)

    alone = typer.Typer()
    alone.callback()(lambda: None)
    monkeypatch.setattr("everserve.cli.app.app", alone)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "everserve_bench", None)
    try:
        importlib.reload(command)
        with pytest.raises(
            ConfigError, match=r"everserve_bench is not installed here: pip install 'everserve\[bench\]'"
        ):
            CliRunner().invoke(alone, ["bench", "failover", "--rounds", "1"], catch_exceptions=False)
    finally:
        monkeypatch.undo()
