"""Fields of configs as flags of a command."""

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from everserve.cli.flags import Said, expand
from everserve.config.base import Config, Flag
from everserve.errors import ConfigError


class Oven(Config, frozen=True, kw_only=True):
    """A component."""

    degrees: Annotated[int, Flag("How hot", min=50, max=300, on_device={"cpu": 180, "cuda": 220})]
    mode: Annotated[str, Flag("How.", name="oven_mode", choices=("fan", "grill"))] = "fan"
    minutes: Annotated[float | None, Flag("How long. Default: until it is done.", min=1)] = None
    racks: Annotated[list[str], Flag("Which.", envvar="RACKS", parse=lambda names: [n.upper() for n in names])]
    is_lit: Annotated[bool, Flag("Light.")] = True
    is_cleaning: Annotated[bool, Flag("Clean.")] = False
    serial: str = ""  # no flag

    def check(self) -> None:
        if self.is_cleaning and self.mode == "grill":
            raise ConfigError("--is-cleaning: not with --oven-mode grill")


@pytest.fixture
def bake():
    """The command line `bake`, and the oven that it makes."""
    app, made = typer.Typer(rich_markup_mode=None), []

    @app.command()
    @expand
    def bake(what: str, *, oven: Said[Oven], port: Annotated[int, typer.Option(help="Where.")] = 1) -> None:
        """Bake."""
        made.append((what, port, oven.make("cuda", racks=["middle"], serial="7")))

    def run(*arguments: str) -> tuple[str, int, Oven]:
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return made.pop() if made else (result.output, result.exit_code, None)  # type: ignore[return-value]

    return run


def test_what_is_not_said(bake):
    assert bake("bread") == ("bread", 1, Oven(degrees=220, racks=["middle"], serial="7"))


def test_what_is_said(bake, monkeypatch):
    _, port, oven = bake("bread", "--degrees", "50", "--oven-mode", "grill", "--minutes", "2", "--racks", "a",
        "--racks", "b", "--no-is-lit", "--port", "3")  # fmt: skip
    assert port == 3
    assert oven == Oven(degrees=50, mode="grill", minutes=2.0, racks=["A", "B"], is_lit=False, serial="7")
    monkeypatch.setenv("RACKS", "top")
    assert bake("bread", "--is-cleaning")[2].racks == ["TOP"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--oven-mode", "steam"), "--oven-mode steam: choose one of fan, grill"),
        (("--oven-mode", "grill", "--is-cleaning"), "--is-cleaning: not with --oven-mode grill"),
    ],
)
def test_values_that_are_refused(bake, arguments, line):
    with pytest.raises(ConfigError) as error:
        bake("bread", *arguments)
    assert str(error.value) == line


@pytest.mark.parametrize(
    "arguments", [("--degrees", "49"), ("--degrees", "x"), ("--mode", "fan"), ("--no-is-cleaning",)]
)
def test_values_that_typer_refuses(bake, arguments):
    assert bake("bread", *arguments)[1:] == (2, None)


def test_help(bake, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    told = bake("--help")[0]
    for text in ("How hot (default: 180 on a CPU, 220 on a GPU).", "50<=x<=300", "[default: fan]", "[env var: RACKS]"):
        assert text in told
    assert "--serial" not in told and "--no-is-lit" in told and "--no-is-cleaning" not in told
    assert told.index("--degrees") < told.index("--port"), "in the place of the config"
