"""`[name(key=value, …), …]` as the whole answer: Llama 3.2 and 4. Values may be written as in Python or in JSON."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from everserve.gateway.text.lark import Lark
from everserve.gateway.text.reading.format import Format, Tool
from everserve.gateway.text.reading.parts import Argued, Called, Said
from everserve.gateway.text.reading.scan import Reads, Scan

_START, _END = "<|python_start|>", "<|python_end|>"
_CONSTANTS = {"true": True, "false": False, "null": None}


class Pythonic(Format):
    name = "pythonic"
    marks = (_START, _END)
    opening, begin, between, closing = "[", "", ", ", "]"
    is_alone = True

    def body(self, lark: Lark, tool: Tool) -> str:
        properties, required = tool.parameters.get("properties", {}), tool.parameters.get("required", ())
        named = [
            lark.rule(f"{lark.literal(name + '=')} {lark.json(tool.property_schema(name))}") for name in properties
        ]
        chosen = '""'  # what comes behind an argument, the last one first
        for name, argument in reversed(list(zip(properties, named, strict=True))):
            comma = f"{lark.literal(', ')} " if chosen != '""' else ""
            rest = f"{argument} ({comma}{chosen}{')?' if _all_optional(tool, name) else ')'}" if comma else argument
            chosen = lark.rule(rest if name in required else f"{rest} | {chosen}")
        return lark.rule(f"{lark.literal(tool.name + '(')} ({chosen}) {lark.literal(')')}")

    def read(self, scan: Scan, tools: Mapping[str, Tool]) -> Reads:
        blanks = yield from scan.skip_blanks()
        yield from scan.starts_with(_START)
        if not scan.rest.startswith("["):
            if blanks:
                yield Said(blanks)
            yield from scan.pass_on([], Said)
            return
        while not scan.has_ended:  # a call is known when its bracket is closed: most answers are short
            yield None
        text, scan.rest = scan.rest.replace(_END, ""), ""
        calls = _parse(text.strip())
        if calls is None:
            yield Said(text)
            return
        for name, arguments in calls:
            yield Called(name)
            yield Argued(json.dumps(arguments, ensure_ascii=False))


def _all_optional(tool: Tool, name: str) -> bool:
    """Whether no argument behind this one is required."""
    names = list(tool.parameters.get("properties", {}))
    required = tool.parameters.get("required", ())
    return not any(other in required for other in names[names.index(name) + 1 :])


def _parse(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args or not re.fullmatch(r"[\w.]+", name := ast.unparse(node.func)):
        raise ValueError("not a call of a tool")
    return name, {str(keyword.arg): _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_value(key)): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)
