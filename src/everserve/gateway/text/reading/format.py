"""What a format of calls is: how calls are read, and the grammar of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everserve.gateway.text.lark import Lark
from everserve.gateway.text.reading.parts import Argued, Called, Part, Said
from everserve.gateway.text.reading.scan import Finds, Reads, Scan

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Tool:
    """One that may be called."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of its arguments: always an object."""
        return {**self.parameters, "type": "object"} if self.parameters else _ANY_OBJECT

    def property_schema(self, name: str) -> dict[str, Any]:
        """The schema of one argument, with what its references lead to."""
        found = self.parameters.get("properties", {}).get(name)
        shared = {key: self.parameters[key] for key in ("$defs", "definitions") if key in self.parameters}
        return {**found, **shared} if isinstance(found, dict) else {}


class Format:
    """One way of writing calls."""

    name = ""
    marks: tuple[str, ...] = ()  # shown to the reader although they may be special tokens
    opening = ""  # before the first call ...
    begin = ""  # ... before each of them ...
    between = ""  # ... behind all but the last
    closing = ""
    is_alone = False  # an answer is calls or text, not both
    has_channels = False  # reasoning is read by this format too
    id_length = 24  # of the ids of calls

    def body(self, lark: Lark, tool: Tool) -> str:
        """A call behind `begin`, to its end, as an expression."""
        raise NotImplementedError

    def read(self, scan: Scan, tools: Mapping[str, Tool]) -> Reads:
        """Reads to the end."""
        raise NotImplementedError

    def preface(self, lark: Lark) -> str:
        """What may come before anything else."""
        return ""

    def wrapped(self, lark: Lark, text: str) -> str:
        """What the client reads, in its place."""
        return text

    def text(self, lark: Lark) -> str:
        """Any text that is no call."""
        return lark.regex(r"[^{\[\s](.|\n)*")


def write_calls(format: Format, lark: Lark, tools: Sequence[Tool], is_one: bool) -> str:
    """One call, or several, and nothing else."""
    calls = f"{lark.literal(format.opening)} {_behind_opening(format, lark, tools, is_one)}"
    return f"{format.preface(lark)} {calls}"


def write_text_and_calls(format: Format, lark: Lark, tools: Sequence[Tool], is_one: bool) -> str:
    """Any text, in which calls may come up."""
    if format.is_alone:
        calls = f"{lark.literal(format.opening)} {_behind_opening(format, lark, tools, is_one)}"
        return f"{format.preface(lark)} ({calls} | {format.text(lark)})"
    if format.opening:
        behind = _behind_opening(format, lark, tools, is_one)
        return f"({lark.text_until(format.opening)} {behind} | {lark.any_text()})"
    bodies = lark.any_of(format.body(lark, tool) for tool in tools)
    call = f"{lark.text_until(format.begin)} {bodies}"
    return f"({call} | {lark.any_text()})" if is_one else f"({call})* {lark.any_text()}"


def _behind_opening(format: Format, lark: Lark, tools: Sequence[Tool], is_one: bool) -> str:
    one = lark.rule(f"{lark.literal(format.begin)} {lark.any_of(format.body(lark, tool) for tool in tools)}")
    more = "" if is_one else f" ({lark.literal(format.between)} {one})*"
    return f"{one}{more} {lark.literal(format.closing)}"


def json_body(lark: Lark, tool: Tool, arguments: str, before: str, after: str) -> str:
    """A call that is written as `{"name": …, arguments: …}`, between two texts."""
    start = f'{before}{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": '
    return lark.rule(f"{lark.literal(start)} {lark.json(tool.schema)} {lark.literal('}' + after)}")


def read_json_call(scan: Scan, mark: str) -> Reads:
    """A call that is written as `{"name": …, "arguments": …}`, in any order. What is no call is said, with the mark in
    front of it."""
    raw = mark + (yield from scan.skip_blanks())
    if not (yield from scan.starts_with("{")):
        yield Said(raw)
        return
    raw += "{"
    name: str | None = None
    early: str | None = None  # arguments that came before the name
    while True:
        raw += yield from scan.skip_blanks()
        if (yield from scan.starts_with("}")) or (scan.has_ended and not scan.rest):
            break
        if (yield from scan.starts_with(",")):
            raw += ","
            continue
        key = yield from scan.take_json()
        between = yield from scan.skip_blanks()
        if not key or not (yield from scan.starts_with(":")):
            if name is None:
                yield Said(raw + key + between)
            return
        between += ":" + (yield from scan.skip_blanks())
        if key == '"name"' and name is None:
            value = yield from scan.take_json()
            name = _text(value)
            raw += key + between + value
            if name is not None:
                yield Called(name)
                if early is not None:
                    yield Argued(early)
        elif key in ('"arguments"', '"parameters"') and name is not None and early is None:
            early = ""
            yield from scan.json_value(Argued)
        else:
            value = yield from scan.take_json()
            raw += key + between + value
            early = value if key in ('"arguments"', '"parameters"') else early
    if name is None:
        yield Said(raw + "}")


def said_until(scan: Scan, marks: Sequence[str], is_behind_call: bool) -> Finds:
    """Text up to a mark, without the blanks that only set calls apart."""
    if is_behind_call:
        yield from scan.skip_blanks()
    return (yield from scan.pass_on(marks, Said, is_trimmed=True))


def complete(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """The calls in these parts: name and arguments."""
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        if isinstance(part, Called):
            calls.append((part.name, []))
        elif isinstance(part, Argued):
            calls[-1][1].append(part.text)
    return [(name, "".join(texts)) for name, texts in calls]


def _text(value: str) -> str | None:
    try:
        name = json.loads(value)
    except ValueError:
        return None
    return name if isinstance(name, str) else None
