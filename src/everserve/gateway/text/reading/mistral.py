"""`[TOOL_CALLS]`, then a list of `{"name": …, "arguments": {…}}`, or, since 2025, a name and its arguments: Mistral."""

import re
from collections.abc import Mapping

from everserve.gateway.text.lark import Lark
from everserve.gateway.text.reading.format import Format, Tool, json_body, read_json_call, said_until
from everserve.gateway.text.reading.parts import Argued, Called, Said
from everserve.gateway.text.reading.scan import Reads, Scan

_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral(Format):
    """The list. What the reader reads is either."""

    name = "mistral"
    marks = (_CALLS, _ARGS, _ID)
    id_length = 9  # its templates check that
    opening, begin, between, closing = f"{_CALLS}[", "", ", ", "]"

    def body(self, lark: Lark, tool: Tool) -> str:
        return json_body(lark, tool, "arguments", "", "")

    def read(self, scan: Scan, tools: Mapping[str, Tool]) -> Reads:
        is_behind_call = False
        while (yield from said_until(scan, [_CALLS], is_behind_call)) is not None:
            yield from scan.skip_blanks()
            if (yield from scan.starts_with("[")):
                yield from _read_list(scan)
            else:
                yield from _read_named(scan)
            is_behind_call = True


class MistralNamed(Mistral):
    """A name and its arguments, with the mark in front of each call."""

    name = "mistral_named"
    opening, begin, between, closing = "", _CALLS, "", ""

    def body(self, lark: Lark, tool: Tool) -> str:
        return lark.rule(f"{lark.literal(tool.name + _ARGS)} {lark.json(tool.schema)}")


def _read_list(scan: Scan) -> Reads:
    while True:
        yield from scan.skip_blanks()
        if (yield from scan.starts_with("]")) or (scan.has_ended and not scan.rest):
            return
        if (yield from scan.starts_with(",")):
            continue
        if not scan.rest.startswith("{"):
            return
        yield from read_json_call(scan, "")


def _read_named(scan: Scan) -> Reads:
    text, mark = yield from scan.take_until([_ARGS, _ID, "{"])
    if mark == _ID:
        _, mark = yield from scan.take_until([_ARGS, "{"])
    name = text.strip()
    if mark is None or not re.fullmatch(r"[\w.:-]+", name):
        yield Said(_CALLS + text + (mark or ""))
        return
    yield Called(name)
    if mark == "{":
        scan.rest = "{" + scan.rest
    else:
        yield from scan.skip_blanks()
    yield from scan.json_value(Argued)
