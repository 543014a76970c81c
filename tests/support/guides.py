"""Guides for the toy model: each of its tokens is a character, the last one ends answers."""

import functools
import json
import tempfile
from pathlib import Path

from everserve.engine.engine import Engine
from everserve.engine.saved import Saved
from everserve.guides.compiling import Compiler
from everserve.guides.guide import Guide, MaskThread
from everserve.guides.vocabulary import read_vocabulary
from everserve.tables.requests import Guided, RequestSpec, Thinking

VOCAB = 97  # the toy model's
END = VOCAB - 1
CHARACTERS = [chr(32 + id) for id in range(95)] + ["\n"]


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": text}]})


LISTS = Guided(grammar=lark("start: /[a-z]{2,9}(,[0-9]+){0,4}/"), end_ids=(END,))
OBJECTS = Guided(
    grammar=lark('start: %json {"type": "object", "x-guidance": {"whitespace_pattern": ""}}'), end_ids=(END,)
)
THOUGHTS = Guided(grammar=LISTS.grammar, end_ids=(END,), thinking=Thinking(end_id=5, max_tokens=6))
GUIDED = (LISTS, OBJECTS, THOUGHTS)


def text_of(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token] for token in tokens if token != END)


def make_tokenizer() -> dict:
    """What a tokenizer.json of these characters says."""
    alphabet = {" ": "Ġ", "\n": "Ċ"}
    vocab = {alphabet.get(character, character): id for id, character in enumerate(CHARACTERS)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": END, "content": "<end>", "special": True, **plain}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


@functools.cache
def toy_compiler() -> Compiler:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tokenizer.json").write_text(json.dumps(make_tokenizer()))
        return Compiler(read_vocabulary(Path(directory), VOCAB))


@functools.cache
def _thread() -> MaskThread:
    return MaskThread()


def guide_of(request: RequestSpec) -> Guide | None:
    """As a worker makes it: its masks are computed by a thread."""
    guided = request.params.guided
    return Guide(toy_compiler(), guided, request.known, _thread()) if guided is not None else None


def add(engine: Engine, request: RequestSpec, saved: Saved | None = None) -> None:
    """With the guide of its grammar."""
    engine.add(request, saved, guide_of(request))
