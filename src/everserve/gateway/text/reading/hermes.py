"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and 3, and many others."""

from collections.abc import Mapping

from everserve.gateway.text.lark import Lark
from everserve.gateway.text.reading.format import Format, Tool, json_body, read_json_call, said_until
from everserve.gateway.text.reading.scan import Reads, Scan

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes(Format):
    name = "hermes"
    marks = (_BEGIN, _END)
    opening, begin, between, closing = "", _BEGIN, "\n", ""

    def body(self, lark: Lark, tool: Tool) -> str:
        return json_body(lark, tool, "arguments", "\n", f"\n{_END}")

    def read(self, scan: Scan, tools: Mapping[str, Tool]) -> Reads:
        is_behind_call = False
        while (yield from said_until(scan, [_BEGIN], is_behind_call)) is not None:
            yield from read_json_call(scan, _BEGIN)
            yield from scan.skip_blanks()
            yield from scan.starts_with(_END)
            is_behind_call = True
