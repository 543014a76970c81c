"""Grammars are compiled in a process of their own: what takes too long ends that process and nothing else."""

import asyncio
import json
import os
import signal

import pytest

from everserve.errors import RequestError
from everserve.gateway.http.requests import CompletionRequest, JsonSchema, JsonSchemaFormat, StructuredOutputs
from everserve.gateway.text.grammars import Grammars
from everserve.gateway.text.lark import Lark
from everserve.gateway.text.structured import constraint_of
from everserve.model.bundled import DEMO_MODEL
from everserve.procs.process import children_of
from tests.support.guides import lark

LARGE = {"properties": {f"p{i}": {"type": "string", "maxLength": i + 1} for i in range(4600)}}


def of_schema(schema: dict) -> str:
    return lark("start: %json " + json.dumps(schema))


def test_grammars_are_checked_and_remembered() -> None:
    async def test() -> None:
        grammars = Grammars(str(DEMO_MODEL), cpu_s=0.5)
        before = set(children_of(os.getpid()))
        for _ in range(2):
            await grammars.check(lark('start: "a"'), 4096, "field")
            with pytest.raises(RequestError, match=r"'field' cannot be used: .*unknown name"):
                await grammars.check(lark("start: x"), 4096, "field")
        with pytest.raises(RequestError, match=r"takes more than 0.5 s of CPU time"):
            await grammars.check(of_schema(LARGE), 4096, "field")
        for pid in set(children_of(os.getpid())) - before:
            os.kill(pid, signal.SIGKILL)
        await grammars.check(lark('start: "b"'), 4096, "field")

    asyncio.run(asyncio.wait_for(test(), 120))


def test_what_a_model_without_a_tokenizer_says(tmp_path) -> None:
    async def test() -> None:
        with pytest.raises(RequestError, match=r"no grammar can be used with .*tokenizer.json"):
            await Grammars(str(tmp_path)).check(lark('start: "a"'), 4096, "field")

    asyncio.run(asyncio.wait_for(test(), 120))


def test_an_answer_is_guided_in_one_way() -> None:
    schema = JsonSchemaFormat(JsonSchema(name="x", schema={}))
    with pytest.raises(RequestError, match=r"'response_format.json_schema.schema' and 'structured_outputs.regex'"):
        constraint_of(
            CompletionRequest(prompt="", response_format=schema, structured_outputs=StructuredOutputs(regex="a"))
        )
    assert constraint_of(CompletionRequest(prompt="", structured_outputs=StructuredOutputs())) is None


def test_literals_and_slashes() -> None:
    writer = Lark({"<s>": 7, "<s>x": 8})
    assert writer.literal('a"<s>x<s>') == r'"a\"" <[8]> <[7]>' and writer.literal("") == '""'
    writer.regex(r"a/b\/c")
    assert r"/a\/b\/c/" in json.loads(writer.text("T0"))["grammars"][0]["lark_grammar"]
