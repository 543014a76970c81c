"""Schemas as people write them, of every kind of keyword: each compiles as a request's would, and whatever ends is
valid by an independent validator."""

import json
from typing import Any

import numpy as np
import pytest

from everserve.errors import RequestError
from everserve.gateway.text.lark import Lark
from everserve.guides.guide import Guide, is_allowed
from everserve.tables.requests import Guided
from tests.support.guides import CHARACTERS, END, VOCAB, toy_compiler

jsonschema_rs = pytest.importorskip("jsonschema_rs")

NUM_WALKS, MOST_TOKENS = 4, 600
ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string", "maxLength": 8}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["zip"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "nothing said": {},
    "true": True,
    "null": {"type": "null"},
    "a boolean": {"type": "boolean"},
    "an integer between": {"type": "integer", "minimum": -3, "maximum": 120},
    "a number above": {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
    "a multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "a string of a length": {"type": "string", "minLength": 3, "maxLength": 5},
    "a pattern": {"type": "string", "pattern": "^(?:[A-Z]{2}-)?[0-9]{3,4}$"},
    "a date": {"type": "string", "format": "date"},
    "a time": {"type": "string", "format": "date-time"},
    "a uuid": {"type": "string", "format": "uuid"},
    "an address of a computer": {"type": "string", "format": "ipv4"},
    "an enum of all types": {"enum": [1, "two", None, {"three": [3]}, 4.5, True]},
    "a constant": {"const": {"a": [1, 'x"\\\n']}},
    "several types": {"type": ["string", "integer", "null"], "maxLength": 6},
    "a list": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
    "a tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "string", "maxLength": 3}],
        "items": False,
        "minItems": 2,
    },
    "an object": ADDRESS,
    "optional fields": {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in "abcd"},
        "additionalProperties": False,
    },
    "further fields of a type": {
        "type": "object",
        "properties": {"id": {"const": 1}},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
    },
    "fields by patterns": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "objects in lists": {"type": "array", "items": ADDRESS, "minItems": 1, "maxItems": 2},
    "definitions": {
        "$defs": {"address": ADDRESS},
        "type": "object",
        "properties": {"home": {"$ref": "#/$defs/address"}, "work": {"$ref": "#/$defs/address"}},
        "required": ["home"],
        "additionalProperties": False,
    },
    "a tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 3},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
                },
                "required": ["name"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "any of": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, ADDRESS, {"type": "null"}]},
    "one of, told apart by a constant": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": {"type": type}},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for kind, type in (("flag", "boolean"), ("nothing", "null"))
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"minimum": 5, "maximum": 7}}, "additionalProperties": False},
        ]
    },
    "names with quotes and blanks": {
        "type": "object",
        "properties": {'a "b"': {"enum": ["x y", "\\"]}, "c\n": {"type": "null"}},
        "required": ['a "b"'],
        "additionalProperties": False,
    },
    "titles, defaults and examples": {
        "title": "T",
        "description": "D",
        "default": 1,
        "examples": [2],
        "type": "integer",
        "minimum": 0,
        "maximum": 3,
    },
}


def walk(schema: Any, seed: int) -> str | None:
    """A random answer; what closes something is likelier than in an even choice. None: it has not ended."""
    lark = Lark({})
    guide = Guide(toy_compiler(), Guided(grammar=lark.text(lark.json(schema)), end_ids=(END,)))
    dice, text = np.random.default_rng(seed), ""
    for _ in range(MOST_TOKENS):
        allowed = np.nonzero(is_allowed(guide.mask(), VOCAB))[0]
        weights = np.array([_weight(id) for id in allowed], float)
        token = int(dice.choice(allowed, p=weights / weights.sum()))
        if token == END:
            return text
        text += CHARACTERS[token]
        guide.advance(token)
    return None


def _weight(id: int) -> float:
    if id == END:
        return 60.0
    character = CHARACTERS[id]
    return {'"': 40.0, "}": 40.0, "]": 40.0, "\\": 0.05, "\n": 0.05, " ": 0.05}.get(character, 1.0)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_ends_is_valid(name: str) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    ended = [text for seed in range(NUM_WALKS) if (text := walk(schema, seed)) is not None]
    assert ended, "no walk came to an end"
    for text in ended:
        assert validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"not": {"type": "integer"}},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"$ref": "#/$defs/missing"},
        {"type": "array", "uniqueItems": True},
        False,
    ],
)
def test_what_cannot_be_kept_is_refused(schema: Any) -> None:
    """Rather than left out."""
    with pytest.raises(RequestError):
        walk(schema, 0)
