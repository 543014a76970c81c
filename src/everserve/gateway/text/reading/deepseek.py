"""`<｜tool▁calls▁begin｜>` with a block for each call: DeepSeek V3 and R1, where arguments stand in a code block, and
V3.1, where they follow the name."""

from collections.abc import Mapping

from everserve.gateway.text.lark import Lark
from everserve.gateway.text.reading.format import Format, Tool, said_until
from everserve.gateway.text.reading.parts import Argued, Called
from everserve.gateway.text.reading.scan import Reads, Scan

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeek31(Format):
    """`name<｜tool▁sep｜>{…}`"""

    name = "deepseek_v31"
    marks = (_CALLS, _CALLS_END, _BEGIN, _SEP, _END)
    opening, begin, between, closing = _CALLS, _BEGIN, "", _CALLS_END

    def body(self, lark: Lark, tool: Tool) -> str:
        return lark.rule(f"{lark.literal(tool.name + _SEP)} {lark.json(tool.schema)} {lark.literal(_END)}")

    def read(self, scan: Scan, tools: Mapping[str, Tool]) -> Reads:
        if (yield from said_until(scan, [_CALLS], is_behind_call=False)) is None:
            return
        while True:
            _, mark = yield from scan.take_until([_BEGIN, _CALLS_END])
            if mark != _BEGIN:
                break
            yield from self._read_call(scan)
        yield from said_until(scan, [], is_behind_call=True)

    def _read_call(self, scan: Scan) -> Reads:
        name, mark = yield from scan.take_until([_SEP])
        if mark is not None:
            yield Called(name.strip())
            yield from scan.skip_blanks()
            yield from scan.json_value(Argued)


class DeepSeek3(DeepSeek31):
    """`function<｜tool▁sep｜>name`, then the arguments in a block of code"""

    name = "deepseek_v3"
    between = "\n"

    def body(self, lark: Lark, tool: Tool) -> str:
        start, end = f"function{_SEP}{tool.name}\n```json\n", f"\n```{_END}"
        return lark.rule(f"{lark.literal(start)} {lark.json(tool.schema)} {lark.literal(end)}")

    def _read_call(self, scan: Scan) -> Reads:
        yield from scan.take_until([_SEP])
        name, mark = yield from scan.take_until(["```json", "```", _END])
        if name.strip():
            yield Called(name.strip())
        if mark in ("```json", "```"):
            yield from scan.skip_blanks()
            yield from scan.json_value(Argued)
