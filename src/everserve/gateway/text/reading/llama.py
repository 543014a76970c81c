"""`{"name": …, "parameters": {…}}` as the whole answer, behind `<|python_tag|>` or not, and several with `;` between
them: Llama 3 and 4."""

from collections.abc import Mapping

from everserve.gateway.text.lark import Lark
from everserve.gateway.text.reading.format import Format, Tool, json_body, read_json_call
from everserve.gateway.text.reading.parts import Said
from everserve.gateway.text.reading.scan import Reads, Scan

_TAG = "<|python_tag|>"


class LlamaJson(Format):
    name = "llama3_json"
    marks = (_TAG,)
    between = "; "
    is_alone = True

    def body(self, lark: Lark, tool: Tool) -> str:
        return json_body(lark, tool, "parameters", "", "")

    def read(self, scan: Scan, tools: Mapping[str, Tool]) -> Reads:
        blanks = yield from scan.skip_blanks()
        is_tagged = yield from scan.starts_with(_TAG)
        if not is_tagged and not scan.rest.startswith("{"):
            if blanks:
                yield Said(blanks)
            yield from scan.pass_on([], Said)
            return
        yield from read_json_call(scan, "")
        while True:
            yield from scan.skip_blanks()
            if not (yield from scan.starts_with(";")):
                break
            yield from read_json_call(scan, ";")
        yield from scan.pass_on([], Said)
