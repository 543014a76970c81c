"""A tag for each argument: texts stand there as they are, everything else as JSON.

    GLM 4.5, 4.6        <tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value> … </tool_call>
    MiniMax M2          <minimax:tool_call> <invoke name="name"> <parameter name="k">v</parameter> … </invoke> …
    Qwen3-Coder         <tool_call> <function=name> <parameter=k> v </parameter> … </function> </tool_call>

The JSON of the arguments is made here, one argument when its tag ends.
"""

import json
from collections.abc import Mapping
from typing import Any

from everserve.gateway.text.lark import Lark
from everserve.gateway.text.reading.format import Format, Tool, said_until
from everserve.gateway.text.reading.parts import Argued, Called
from everserve.gateway.text.reading.scan import Reads, Scan


class _Tagged(Format):
    """What the three have in common."""

    value_end = ""
    is_indented = False  # a value stands on lines of its own

    def _argument(self, lark: Lark, tool: Tool, name: str, before: str, after: str) -> str:
        schema = tool.property_schema(name)
        start = lark.literal(before + ("\n" if self.is_indented else ""))
        end = ("\n" if self.is_indented else "") + self.value_end
        if _is_text(schema) and not schema.get("enum"):
            return lark.rule(f"{start} {lark.text_until(end)} {lark.literal(after)}")
        if _is_text(schema):
            texts = lark.any_of(lark.literal(str(value)) for value in schema["enum"])
            return lark.rule(f"{start} {texts} {lark.literal(end + after)}")
        return lark.rule(f"{start} {lark.json(schema)} {lark.literal(end + after)}")

    def _arguments(self, lark: Lark, tool: Tool, before: str, after: str) -> str:
        """All of them in the order of the schema; those that are not required may be missing."""
        properties, required = tool.parameters.get("properties", {}), tool.parameters.get("required", ())
        written = [
            self._argument(lark, tool, name, before.format(name), after) + ("" if name in required else "?")
            for name in properties
        ]
        return " ".join(written) or '""'

    def _value(self, tool: Tool | None, name: str, text: str) -> str:
        """One argument as JSON."""
        if self.is_indented:
            text = text.removeprefix("\n").removesuffix("\n")
        if tool is not None and _is_text(tool.property_schema(name)):
            return json.dumps(text, ensure_ascii=False)
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except ValueError:
            return json.dumps(text, ensure_ascii=False)


class Glm(_Tagged):
    name = "glm45"
    _BEGIN, _END = "<tool_call>", "</tool_call>"
    _KEY, _KEY_END, _VALUE = "<arg_key>", "</arg_key>", "<arg_value>"
    value_end = "</arg_value>"
    marks = (_BEGIN, _END, _KEY, _KEY_END, _VALUE, value_end)
    opening, begin, between, closing = "", _BEGIN, "\n", ""

    def body(self, lark: Lark, tool: Tool) -> str:
        arguments = self._arguments(lark, tool, f"{self._KEY}{{}}{self._KEY_END}\n{self._VALUE}", "\n")
        return lark.rule(f"{lark.literal(tool.name + chr(10))} {arguments} {lark.literal(self._END)}")

    def read(self, scan: Scan, tools: Mapping[str, Tool]) -> Reads:
        is_behind_call = False
        while (yield from said_until(scan, [self._BEGIN], is_behind_call)) is not None:
            name, mark = yield from scan.take_until([self._KEY, self._END])
            if mark is None:
                return
            yield Called(name.strip())
            tool, separator = tools.get(name.strip()), "{"
            while mark == self._KEY:
                key, mark = yield from scan.take_until([self._KEY_END])
                _, mark = yield from scan.take_until([self._VALUE])
                value, mark = yield from scan.take_until([self.value_end])
                if mark is None:
                    return
                yield Argued(
                    f"{separator}{json.dumps(key.strip(), ensure_ascii=False)}: {self._value(tool, key.strip(), value)}"
                )
                separator = ", "
                _, mark = yield from scan.take_until([self._KEY, self._END])
            yield Argued("}" if separator == ", " else "{}")
            is_behind_call = True


class MiniMax(_Tagged):
    name = "minimax_m2"
    value_end = "</parameter>"
    marks = ("<minimax:tool_call>", "</minimax:tool_call>")
    opening, begin, between, closing = "<minimax:tool_call>\n", '<invoke name="', "\n", "\n</minimax:tool_call>"
    _parameter, _invoke_end = '<parameter name="{}">', "</invoke>"
    _quote = '">'

    def body(self, lark: Lark, tool: Tool) -> str:
        arguments = self._arguments(lark, tool, self._parameter, "\n")
        return lark.rule(f"{lark.literal(tool.name + self._quote + chr(10))} {arguments} {lark.literal(self._ending)}")

    @property
    def _ending(self) -> str:
        return self._invoke_end

    def read(self, scan: Scan, tools: Mapping[str, Tool]) -> Reads:
        is_behind_call = False
        start, end = self.opening.strip() or self.begin, self.closing.strip()
        while (yield from said_until(scan, [start], is_behind_call)) is not None:
            while True:
                _, mark = yield from scan.take_until([self._call_start, end])
                if mark != self._call_start:
                    break
                yield from self._read_call(scan, tools)
            is_behind_call = True

    @property
    def _call_start(self) -> str:
        return self.begin

    def _read_call(self, scan: Scan, tools: Mapping[str, Tool]) -> Reads:
        name, _ = yield from scan.take_until([self._quote])
        yield Called(name.strip())
        tool, separator = tools.get(name.strip()), "{"
        parameter = self._parameter.partition("{}")[0]
        while True:
            _, mark = yield from scan.take_until([parameter, self._invoke_end])
            if mark != parameter:
                break
            key, _ = yield from scan.take_until([self._quote])
            value, mark = yield from scan.take_until([self.value_end])
            if mark is None:
                return
            yield Argued(f"{separator}{json.dumps(key, ensure_ascii=False)}: {self._value(tool, key, value)}")
            separator = ", "
        if mark is not None:
            yield Argued("}" if separator == ", " else "{}")


class Qwen3Coder(MiniMax):
    name = "qwen3_coder"
    marks = ("<tool_call>", "</tool_call>")
    is_indented = True
    opening, begin, between, closing = "", "<tool_call>\n<function=", "\n", "</tool_call>"
    _parameter, _invoke_end = "<parameter={}>", "</function>"
    _quote = ">"

    @property
    def _ending(self) -> str:
        return f"{self._invoke_end}\n</tool_call>"

    @property
    def _call_start(self) -> str:
        return "<function="

    def read(self, scan: Scan, tools: Mapping[str, Tool]) -> Reads:
        is_behind_call = False
        while (yield from said_until(scan, ["<tool_call>"], is_behind_call)) is not None:
            _, mark = yield from scan.take_until([self._call_start, self.closing])
            if mark == self._call_start:
                yield from self._read_call(scan, tools)
                yield from scan.take_until([self.closing])
            is_behind_call = True


def _is_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string"
