"""Tables of results: a scenario says which columns, and what stands in them; this prints them.

A cell is made of a row, which is a part of a result. What a row does not have is left empty.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everserve_bench import report

_BARS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 100
Row = Mapping[str, Any]
Cell = Callable[[Row], str]


@dataclass(frozen=True)
class Table:
    """Columns are titles and cells."""

    title: str
    columns: Sequence[tuple[str, Cell]]
    rows: Sequence[Row]


def show(parts: Iterable[Table | str]) -> None:
    """A table without rows is left out."""
    for part in parts:
        if isinstance(part, str):
            print(part)
        elif part.rows:
            cells = [[cell(row) for _, cell in part.columns] for row in part.rows]
            report.print_table(part.title, [title for title, _ in part.columns], cells)


# -- cells ---------------------------------------------------------------------------------------


def text(key: str, form: str = "", unit: str = "") -> Cell:
    """The value itself."""
    return lambda row: f"{row[key]:{form}}{unit}" if row.get(key) is not None else ""


def worst(key: str, digits: int = 1, scale: float = 1) -> Cell:
    """Median and, in brackets, the worst."""
    return lambda row: both(row.get(key), digits, scale)


def medians(*keys: str, digits: int = 1, scale: float = 1) -> Cell:
    """The medians of several figures, with a slash between them."""
    return lambda row: " / ".join(f"{scale * row[key]['median']:,.{digits}f}" for key in keys if key in row)


def interval(key: str, digits: int = 3) -> Cell:
    """A ratio: median and 95 % interval."""
    return lambda row: ratio(row[key], digits) if row.get(key) else ""


def both(spread: Mapping[str, float] | None, digits: int, scale: float = 1) -> str:
    """Median and, in brackets, the worst; nothing if nothing is known."""
    if spread is None:
        return ""
    median, most = scale * spread["median"], scale * spread["max"]
    return f"{median:.{digits}f} ({most:.{digits}f})" if median < 1000 else f"{median:.0f} ({most:.0f})"


def ratio(found: Mapping[str, float], digits: int = 3) -> str:
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f}-{found['high']:.{digits}f})"


# -- lines ---------------------------------------------------------------------------------------


def exactness(result: Row) -> Iterator[str]:
    """The exactness of all streams beside the undisturbed ones (load.py), and what broke some."""
    verdict = "all exact" if not result["num_wrong"] else f"{result['num_wrong']} NOT EXACT"
    yield f"{result['num_streams']} streams, {result['num_tokens']} tokens: {verdict}"
    yield from (f"error: {error}" for error in result["errors"])


def bars(values: list[float]) -> str:
    """Several values share a bar where there are many."""
    width = -(-len(values) // _MAX_BARS)
    parts = [values[i : i + width] for i in range(0, len(values), width)] if width else []
    means = [sum(part) / len(part) for part in parts]
    most = max(means, default=0.0) or 1.0
    return "".join(_BARS[round(mean / most * (len(_BARS) - 1))] for mean in means) + f" (most: {most:.0f})"
