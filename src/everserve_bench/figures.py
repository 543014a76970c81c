"""Figures in documents, and the results that they come from.

A marker, which readers do not see, says where the figures before it come from:

    noticed after 5.9 ms (18.3)<!-- = failover faults.expert.detected_s: 1000 * median, 1000 * max -->

    FILE        of bench/results, without .json
    SCOPE       what the expressions begin in (optional)
    EXPRESSIONS of `cited.py`: the last is that of the last number before the marker, and so on; `_` for a number that
                is no figure. One that is true or false belongs to no number, and must be true; null (nothing was
                measured) belongs to none either. More files after a `;`

In a table expressions that all rows have are said once, before it, and a row only names its scopes:

    <!-- each row: worst(gap_ms), worst(whole_s) -->
    | killed | largest gap, ms | full strength after, s |
    |---|--:|--:|
    | an expert worker | 21.1 (37.3) | 0.17 (0.22) <!-- = failover faults.expert --> |

A figure must be what its expression gives, with as many decimals as it is written with. Everything that looks measured
needs a marker (a number before a unit, a decimal, and in tables a number in a column whose heading has a unit; first
columns are labels), or one of these:

    <!-- no result: WHY -->                 the numbers before it, back to the last marker, are not our measurements
    <!-- columns without results: A; B -->  before a table: nor are these columns

How a result was measured is written here, not by hand:

    <!-- run: FILE -->
    ...
    <!-- end -->
"""

import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from everserve_bench import cited

_UNITS = r"ms|µs|s|seconds|minutes|%|x|times|tokens/s|[KMG]i?B|[KMGT]i?B/s|[GT]FLOP/s|faults|tokens (?:were )?compared"
_NUMBER = re.compile(
    r"(?<![\w.,+/#§=-])(?:(?<=[\s(])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?=x\b|(?![\w+]|[./]\d|,\d{3}|-[A-Za-z]))"
)
_BEFORE_UNIT = re.compile(rf"[ \u00a0]?(?:{_UNITS})(?![\w/])")
_UNIT_IN_HEADING = re.compile(rf"(?<![\w/-])(?:{_UNITS})(?![\w/-])")
_VERSION = re.compile(r"(?:Python|Linux|PyTorch|torch|vLLM|SGLang|Dynamo|Triton|transformers|Llama|Figs?\.|Table|§) ?$")
_MARKER = re.compile(r"<!-- =\s(?P<sources>.*?) -->|<!-- no result:\s(?P<why>.*?) -->", re.DOTALL)
_BEFORE_TABLE = re.compile(r"<!-- (columns without results|each row): (.*?) -->")
_HIDDEN = re.compile(r"`[^`\n]*`|\]\([^()\s]*\)|<!--.*?-->", re.DOTALL)  # has no figures
_RUN = re.compile(r"(<!-- run: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_WIDTH = 116


@dataclass
class Results:
    """All that are cited, and what is read of each."""

    folder: Path
    read: dict[str, set[cited.Path]] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)
    _loaded: dict[str, dict[str, Any]] = field(default_factory=dict)

    def values(self, name: str, scope: str, expressions: str) -> list[Any]:
        return cited.evaluate(self.load(name), self.read.setdefault(name, set()), scope, expressions)

    def load(self, name: str) -> dict[str, Any]:
        if name not in self._loaded:
            self._loaded[name] = json.loads((self.folder / f"{name}.json").read_text())
        return self._loaded[name]

    def replace(self, name: str, result: dict[str, Any]) -> None:
        """By one that has not been written yet."""
        self._loaded[name] = result


@dataclass(frozen=True)
class Finding:
    line: int
    what: str
    is_broken: bool = False  # nothing can be said: a marker that does not fit its result


@dataclass(frozen=True)
class Checked:
    """A document with the figures of the results, and what is wrong with it as it was."""

    text: str
    wrong: list[Finding]
    unsourced: list[Finding]


def check(text: str, results: Results) -> Checked:
    wrong: list[Finding] = []
    unsourced: list[Finding] = []
    pieces: list[str] = []
    for block in _blocks(_write_runs(text, results, wrong)):
        pieces.append(_check_block(block, results, wrong, unsourced))
    return Checked("".join(pieces), wrong, unsourced)


@dataclass(frozen=True)
class _Table:
    headings: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()  # of these
    each_row: tuple[str, ...] = ()  # expressions, by file


@dataclass(frozen=True)
class _Block:
    """A paragraph, or a row of a table: what a marker's figures must be in."""

    text: str
    line: int
    table: _Table = _Table()  # of which it is a row
    is_code: bool = False


def _blocks(text: str) -> Iterator[_Block]:
    """In order; joined they are the text."""
    table = _Table()
    paragraph: list[str] = []
    began, is_fenced = 1, False
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        is_row = line.startswith("|")
        is_fence = line.startswith("```")
        is_code = is_fenced or is_fence or (line.startswith("    ") and not paragraph)
        if paragraph and (is_row or is_code or not line.strip()):
            yield _Block("".join(paragraph), began)
            paragraph = []
        is_fenced ^= is_fence
        if is_row:
            yield _Block(line, number, table)
            table = replace(table, headings=table.headings or _cells(line))
        elif said := _BEFORE_TABLE.match(line):
            parts = tuple(part.strip() for part in said[2].split(";"))
            table = replace(table, exempt=parts) if "without" in said[1] else replace(table, each_row=parts)
            yield _Block(line, number)
        else:
            table = _Table()
            if is_code or not line.strip():
                yield _Block(line, number, is_code=is_code)
                continue
            began = began if paragraph else number
            paragraph.append(line)
    if paragraph:
        yield _Block("".join(paragraph), began)


def _cells(row: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in row.strip().strip("|").split("|"))


def _check_block(block: _Block, results: Results, wrong: list[Finding], unsourced: list[Finding]) -> str:
    if block.is_code:
        return block.text
    visible = _HIDDEN.sub(lambda found: " " * len(found[0]), block.text)
    numbers = list(_NUMBER.finditer(visible))
    known: set[int] = set()  # where numbers begin that have a source, or need none
    edits: list[tuple[int, int, str]] = []
    since = 0
    for marker in _MARKER.finditer(block.text):
        line = block.line + block.text.count("\n", 0, marker.start())
        before = [number for number in numbers if since <= number.start() < marker.start()]
        since = marker.end()
        if marker["why"]:
            known.update(number.start() for number in before)
            continue
        values = _values(marker["sources"], block.table, results, line, wrong)
        if len(values) > len(before):
            what = f"{len(values)} figures for {len(before)} numbers: {marker[0]}"
            wrong.append(Finding(line, what, is_broken=True))
            continue
        for number, value in zip(before[len(before) - len(values) :], values, strict=True):
            known.add(number.start())
            right = number[0] if isinstance(value, cited.NoFigure) else _as_written(number[0], value)
            if right != number[0]:
                wrong.append(Finding(line, f"{number[0]} is {right}: {marker[0]}"))
                edits.append((number.start(), number.end(), right))
    for number in numbers:
        if number.start() not in known and _looks_measured(number, visible, block):
            line = block.line + block.text.count("\n", 0, number.start())
            unsourced.append(Finding(line, visible[max(0, number.start() - 30) : number.end() + 15].strip()))
    text = block.text
    for begin, end, right in reversed(edits):
        text = text[:begin] + right + text[end:]
    return text


def _values(sources: str, table: _Table, results: Results, line: int, wrong: list[Finding]) -> list[Any]:
    """The values of one marker. What cannot be read leaves its number as it is."""
    values: list[Any] = []
    for source, of_table in zip_longest(sources.split(";"), table.each_row[: sources.count(";") + 1], fillvalue=""):
        where, _, expressions = source.strip().partition(":")
        expressions = expressions or of_table
        name, _, scope = where.strip().partition(" ")
        try:
            found = results.values(name, " ".join(scope.split()), " ".join(expressions.split()))
        except Exception as error:  # whatever an expression that does not fit its result may raise
            wrong.append(Finding(line, f"{source.strip()}: {type(error).__name__}: {error}", is_broken=True))
            return []
        if any(value is False for value in found):
            wrong.append(Finding(line, f"not true: {source.strip()}", is_broken=True))
        found = [value for value in found if value is not None and not isinstance(value, bool)]
        if not all(isinstance(value, int | float | cited.NoFigure) for value in found):
            wrong.append(Finding(line, f"no number: {source.strip()}: {found}", is_broken=True))
            return []
        values += found
    return values


def _as_written(text: str, value: float) -> str:
    """With as many decimals as it has there."""
    decimals = len(text.partition(".")[2])
    right = f"{value:,.{decimals}f}"
    return right.removeprefix("-") if not right.strip("-0.,") else right


def _looks_measured(number: re.Match[str], visible: str, block: _Block) -> bool:
    is_exact = "." in number[0] and not _VERSION.search(visible, 0, number.start())
    if headings := block.table.headings:
        column = visible.count("|", 0, number.start()) - 1
        heading = headings[column] if column < len(headings) else ""
        if column == 0 or heading in block.table.exempt:
            return False
        is_exact |= "," in number[0] or bool(_UNIT_IN_HEADING.search(heading))
    return is_exact or bool(_BEFORE_UNIT.match(visible, number.end()))


def _write_runs(text: str, results: Results, wrong: list[Finding]) -> str:
    def rewrite(found: re.Match[str]) -> str:
        names = [name.strip() for name in found[2].split(",")]
        line = text.count("\n", 0, found.start()) + 1
        try:
            body = "\n".join(how(name, results) for name in names)
        except (OSError, KeyError) as error:
            wrong.append(Finding(line, f"{found[2]}: {type(error).__name__}: {error}", is_broken=True))
            return found[0]
        results.runs.update(names)
        if found[0] != (right := f"{found[1]}{body}{found[3]}"):
            wrong.append(Finding(line, f"how {found[2]} was measured is not what the file says"))
        return right

    return _RUN.sub(rewrite, text)


def how(name: str, results: Results) -> str:
    """The command, and where and with what it ran, as the file says."""
    environment = results.load(name)["environment"]
    machine = environment["gpu"] if name.startswith("gpu/") else environment["cpu"].partition(" @")[0]
    dirty = ", with uncommitted changes" if environment["dirty"] else ""
    command = " \\\n".join(_wrap(environment["command"]))
    return (
        f"\n{textwrap.indent(command, '    ')}\n\n"
        f"*`bench/results/{name}.json`: {environment['date']}, commit {environment['commit']}{dirty};"
        f" {machine}, {environment['num_cores']} {environment['machine']} cores.*\n"
    )


def _wrap(command: str) -> list[str]:
    """Before flags, which stay with their values; never inside quotes."""
    parts: list[str] = []
    for word in shlex.split(command):
        if parts and not word.startswith("-"):
            parts[-1] += f" {shlex.quote(word)}"
        else:
            parts.append(shlex.quote(word))
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) > _WIDTH:
            lines.append("   ")
        lines[-1] += f" {part}"
    return lines
