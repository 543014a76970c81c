"""Flags of vLLM that are not here: a line that says what to do instead, and never a way to inject faults."""

import re

import pytest
import typer
from typer.testing import CliRunner

from everserve.cli import serve as command
from everserve.cli.foreign_flags import HINTS, ServeCommand, hint, similar
from everserve.errors import ConfigError

APP = typer.Typer(rich_markup_mode=None, add_completion=False)
APP.command(cls=ServeCommand)(command.serve)
PARAMETERS = typer.main.get_command(APP).params
OPTIONS = {name for parameter in PARAMETERS for name in parameter.opts if name.startswith("-")}


def refusal(*flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(APP, ["demo", *flags], catch_exceptions=False)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--trust-remote-code",), "--trust-remote-code: no code of a model is ever run; leave it out"),
        (("--reasoning-config", "x"), "--reasoning-config: reasoning is told apart if it is known how it is marked"),
        (
            ("--quantization-config=x",),
            "--quantization-config: what weights are quantised with is read from config.json",
        ),
        (("--swap_space", "4"), "--swap_space: the KV cache is not moved to the host"),
        (("--no-enable-chunked-prefill",), "--no-enable-chunked-prefill: prompts are always computed in chunks"),
        (("-pp", "2"), "-pp: layers are not divided into stages"),
        (("-O3",), "-O: steps on a GPU are always captured as graphs"),
        (("--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"), "--ssl-certfile: TLS in the gateway would die with it"),
        (("--uvicorn-log-level", "debug"), "--uvicorn-log-level: --log-level says it of all processes"),
        (("--disable-log-requests",), "--disable-log-requests: requests are never logged"),
        (("--max-num-sequences", "2"), "No such option: --max-num-sequences (did you mean --max-num-seqs"),
        (("--max_model_len", "2"), "No such option: --max_model_len (did you mean --max-model-len"),
        (("--no-such-flag-at-all",), "No such option: --no-such-flag-at-all"),
        (("-z",), "No such option: -z"),
    ],
)
def test_what_is_said_of_a_flag(flags: tuple[str, ...], line: str) -> None:
    assert refusal(*flags).startswith(line)


def test_a_hint_is_of_a_flag_that_is_not_here_and_names_flags_that_are() -> None:
    here = {option.lstrip("-") for option in OPTIONS} | {f"no-{option.lstrip('-')}" for option in OPTIONS}
    assert not HINTS.keys() & here
    for line in HINTS.values():
        assert {*re.findall(r"(?<![\w-])--?[a-z][a-z-]*", line)} <= OPTIONS | {f"--{name}" for name in here}


@pytest.mark.parametrize(
    "flag", ["--enable-chao", "--enable-chaoss", "--enable_chaos_", "--chaos", "--enable-auto-tool", "--enable-faults"]
)
def test_a_flag_that_lets_faults_be_injected_is_never_suggested(flag: str) -> None:
    assert "--enable-chaos" in OPTIONS
    assert "--enable-chaos" not in refusal(flag).removeprefix(f"No such option: {flag}")
    assert "enable_chaos" not in similar(flag.lstrip("-").replace("-", "_"), ["enable_chaos", "enable_eplb"])


def test_a_file_of_flags_gets_the_same_lines(tmp_path) -> None:
    flags = tmp_path / "flags.yaml"
    flags.write_text("tool-server: x\nenable_chao: true\nmax-model-length: 3\n")
    line = refusal("--config", str(flags))
    assert "tool-server (parsers of calls are built in (--tool-call-parser); leave it out)" in line
    assert "max-model-length (did you mean max-model-len?)" in line and "chaos" not in line


def test_flags_that_are_nobodys_have_no_hint() -> None:
    assert [hint(flag) for flag in ("--max-num-seqs", "--no-such-flag", "-z", "")] == [None] * 4
