"""Channels, as gpt-oss writes them: reasoning, text and calls in one.

    <|channel|>analysis<|message|> reasoning <|end|><|start|>assistant<|channel|>final<|message|> text
    <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>

An answer begins behind `<|start|>assistant`, which is the end of its prompt.
"""

import re
from collections.abc import Mapping

from everserve.gateway.text.lark import Lark
from everserve.gateway.text.reading.format import Format, Tool
from everserve.gateway.text.reading.parts import Argued, Called, Said, Thought
from everserve.gateway.text.reading.scan import Reads, Scan

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CONSTRAIN = "<|constrain|>"


class Harmony(Format):
    name = "openai"
    marks = (_CHANNEL, _MESSAGE, _START, _CONSTRAIN, *_ENDS)
    opening, begin, between, closing = "", f"{_CHANNEL}commentary to=functions.", "<|call|>", ""
    is_alone = has_channels = True

    def body(self, lark: Lark, tool: Tool) -> str:
        start = f"{tool.name} {_CONSTRAIN}json{_MESSAGE}"
        return lark.rule(f"{lark.literal(start)} {lark.json(tool.schema)}")

    def preface(self, lark: Lark) -> str:
        start, end = lark.literal(f"{_CHANNEL}analysis{_MESSAGE}"), lark.literal(f"<|end|>{_START}assistant")
        return lark.rule(f"({start} {lark.any_text()} {end})?")

    def wrapped(self, lark: Lark, text: str) -> str:
        return f"{lark.literal(f'{_CHANNEL}final{_MESSAGE}')} {text}"

    def text(self, lark: Lark) -> str:
        return self.wrapped(lark, lark.any_text())

    def read(self, scan: Scan, tools: Mapping[str, Tool]) -> Reads:
        while True:
            header, mark = yield from scan.take_until([_MESSAGE])
            if mark is None:
                if header.strip() and _CHANNEL not in header and _START not in header:
                    yield Said(header)  # a model that does not write channels
                return
            called = re.search(r"to=(?:functions\.)?([\w.-]+)", header)
            channel = header.rpartition(_CHANNEL)[2].strip().partition(" ")[0]
            if called is not None:
                yield Called(called[1])
                yield from scan.pass_on(_ENDS, Argued)
            else:
                yield from scan.pass_on(_ENDS, Thought if channel == "analysis" else Said)
            if scan.has_ended and not scan.rest:
                return
