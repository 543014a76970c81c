"""`everserve bench show`: the tables of results that were written before; as Markdown, for a document."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from everserve.errors import ConfigError
from everserve_bench import (
    balance_report,
    degree_report,
    grey_report,
    mask_report,
    open_load_report,
    prefill_report,
    report,
    runner,
)
from everserve_bench.micro import decode_report, start_report
from everserve_bench.scenarios import SCENARIOS

Show = Callable[[dict[str, Any], Path], None]
_SHOW: dict[str, Show] = {
    "decode": decode_report.show,
    "degree": degree_report.show,
    "prefill": prefill_report.show,
    "prompts": prefill_report.show_alone,
    "balance": balance_report.show,
    "mask": mask_report.show,
    "start": start_report.show,
    "load": open_load_report.show,
    "grey": grey_report.show,
}
_SCENARIOS = {scenario.NAME: scenario for scenario in SCENARIOS}

_CUT_SHORT = "This run was cut short."


def show(paths: list[Path], is_markdown: bool) -> None:
    """One after the other. What a file holds is told by its name: checkpoint-long.json is of `bench checkpoint`."""
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file")
        if _name(path) not in {**_SHOW, **_SCENARIOS}:
            names = ", ".join({**_SHOW, **_SCENARIOS})
            raise ConfigError(f"{path}: its name should begin with one of {names}, as it was written")
    with report.markdown(is_markdown):
        for path in paths:
            _show(path, is_markdown)


def _show(path: Path, is_markdown: bool) -> None:
    result = _read(path)
    environment = result.get("environment")  # none if the run was cut short
    if is_markdown:
        print(f"\n### {path.stem}\n\n    {environment['command'] if environment else _CUT_SHORT}\n")
    elif not environment:
        print(_CUT_SHORT)
    try:
        if _name(path) in _SCENARIOS:
            runner.show(_SCENARIOS[_name(path)], result, path, _plot_beside(path))
        else:
            _SHOW[_name(path)](result, path)
    except KeyError as error:
        why = "another version wrote it, or `everserve bench publish` shortened it"
        raise ConfigError(f"{path}: it has no {error}: {why}") from error
    except (AttributeError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} is no result of `everserve bench`: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        result = report.read_json(path)
    except ValueError as error:  # no JSON, or no text
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict):
        raise ConfigError(f"{path} is no result of `everserve bench`")
    return result


def _name(path: Path) -> str:
    return path.stem.split("-")[0] if path.suffix == ".json" else ""


def _plot_beside(path: Path) -> Path | None:
    plot = path.with_suffix(".png")
    return plot if plot.is_file() else None
