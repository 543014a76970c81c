"""Tables for people, JSON for machines."""

import json
import re
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from everserve.provenance import LOCAL, environment

_NUMBERS = re.compile(r"\[[-+\d.eE,\s]*\]")  # a list of numbers, for one line instead of thousands


def write(name: str, result: dict[str, Any], directory: Path | None) -> Path:
    """The whole result as JSON, beside the environment it was measured in."""
    directory = directory or LOCAL
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(as_text({"environment": environment(), **result}))
    return path


def as_text(result: dict[str, Any]) -> str:
    text = json.dumps(result, indent=1)
    return _NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n"


def keep(name: str, result: dict[str, Any], directory: Path | None) -> None:
    """What there is so far: a run that is cut short leaves it. Where it ran is said by `write`, at the end, because to
    ask a GPU for its name is to use it, beside a server that shares it by MPS."""
    directory = directory or LOCAL
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps(result))


_style = {"is_markdown": False}


@contextmanager
def markdown(is_wanted: bool) -> Iterator[None]:
    """For all tables that are printed meanwhile."""
    _style["is_markdown"] = is_wanted
    try:
        yield
    finally:
        _style["is_markdown"] = False


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    if _style["is_markdown"]:
        lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
        print(f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
        return
    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


class Steal:
    """How much of the cores' time the host of this virtual machine took for others, since this was made."""

    def __init__(self) -> None:
        self._before = _cpu_times()

    def share(self) -> float:
        total, stolen = (now - before for now, before in zip(_cpu_times(), self._before, strict=True))
        return stolen / total if total else 0.0


def spread(values: list[float]) -> dict[str, float]:
    """Median and range of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _cpu_times() -> tuple[int, int]:
    """All ticks of all cores so far, and those stolen."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks), ticks[7]


def read_json(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result
