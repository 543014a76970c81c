"""What a request wants its answer to look like, as an expression of a grammar.

    response_format        OpenAI's: json_object, json_schema; and structural_tag
    structured_outputs     vLLM's: json, json_object, regex, choice, grammar, structural_tag
    guided_json, ...       vLLM's older names for the same

One of them at most. What comes before and around it (reasoning, calls of tools) is not known here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from everserve.errors import RequestError
from everserve.gateway.http.requests import (
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
    StructuredOutputs,
)
from everserve.gateway.text.lark import Lark
from everserve.gateway.text.structural_tags import write_structural_tag

Write = Callable[[Lark], str]
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """How an answer must be: `write` adds it to a grammar."""

    field: str  # that asks for it
    write: Write
    most_bytes: int | None = None  # that it can have, where that is known
    user_grammar: str | None = None  # Lark or GBNF


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """What the request asks for; a RequestError if it asks for several things."""
    found = [*_of_response_format(request), *_of_structured_outputs(request), *_of_guided(request)]
    if len(found) > 1:
        fields = " and ".join(f"'{each.field}'" for each in found)
        raise RequestError(f"An answer can be guided in one way: {fields} were given.", found[1].field)
    return found[0] if found else None


def _of_response_format(request: GenerationRequest) -> list[Constraint]:
    wanted, field = request.response_format, "response_format"
    if isinstance(wanted, JsonObjectFormat):
        return [_json(field, _ANY_OBJECT)]
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.json_schema.schema
        return [_json(f"{field}.json_schema.schema", _ANY_OBJECT if schema is None else schema)]
    if isinstance(wanted, StructuralTagFormat):
        tag = {"structures": wanted.structures, "triggers": wanted.triggers, "format": wanted.format}
        return [_structural_tag(field, tag)]
    return []


def _of_structured_outputs(request: GenerationRequest) -> list[Constraint]:
    wanted, field = request.structured_outputs, "structured_outputs"
    return [] if wanted is None else _of_options(wanted, lambda name: f"{field}.{name}")


def _of_guided(request: GenerationRequest) -> list[Constraint]:
    wanted = StructuredOutputs(
        json=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
        whitespace_pattern=request.guided_whitespace_pattern,
    )
    return _of_options(wanted, lambda name: f"guided_{name}")


def _of_options(wanted: StructuredOutputs, field: Callable[[str], str]) -> list[Constraint]:
    found: list[Constraint] = []
    blanks = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    if wanted.json is not None:
        found.append(_json(field("json"), _schema(wanted.json, field("json")), blanks))
    if wanted.json_object:
        found.append(_json(field("json_object"), _ANY_OBJECT, blanks))
    if (pattern := wanted.regex) is not None:
        found.append(Constraint(field=field("regex"), write=lambda lark: lark.regex(pattern)))
    if (texts := wanted.choice) is not None:
        found.append(
            Constraint(
                field=field("choice"),
                write=lambda lark: lark.any_of(map(lark.literal, texts)),
                most_bytes=max(len(text.encode()) for text in texts),
            )
        )
    if (grammar := wanted.grammar) is not None:
        found.append(Constraint(field=field("grammar"), write=lambda lark: lark.lark(grammar), user_grammar=grammar))
    if wanted.structural_tag is not None:
        tag = _object(wanted.structural_tag, field("structural_tag"))
        found.append(_structural_tag(field("structural_tag"), tag))
    return found


def _json(field: str, schema: Any, blanks: str | None = None) -> Constraint:
    return Constraint(field=field, write=lambda lark: lark.json(schema, blanks))


def _structural_tag(field: str, tag: dict[str, Any]) -> Constraint:
    write_structural_tag(Lark({}), tag, field)  # what is wrong with it is told now
    return Constraint(field=field, write=lambda lark: write_structural_tag(lark, tag, field))


def _schema(given: str | dict[str, Any] | bool, field: str) -> Any:
    return _parsed(given, field) if isinstance(given, str) else given


def _object(given: str | dict[str, Any], field: str) -> dict[str, Any]:
    parsed = _parsed(given, field) if isinstance(given, str) else given
    if not isinstance(parsed, dict):
        raise RequestError(f"'{field}' must be an object.", field)
    return parsed


def _parsed(text: str, field: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"'{field}' is not JSON: {error}", field) from error
