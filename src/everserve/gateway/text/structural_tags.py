"""Structural tags: text in which tags of a certain form may, or must, come up.

Two forms: `structures` with `triggers`, and `format`, which nests. The second one's types: const_string, json_schema,
regex, grammar, any_text, sequence, or, tag, triggered_tags, tags_with_separator.
"""

from collections.abc import Callable
from typing import Any

from everserve.errors import RequestError
from everserve.gateway.text.lark import Lark

_MAX_DEPTH = 32


def write_structural_tag(lark: Lark, tag: dict[str, Any], field: str) -> str:
    """An expression for all of it."""
    try:
        if tag.get("format") is not None:
            return _Writer(lark).write(tag["format"])
        structures, triggers = tag["structures"], tag["triggers"]
        tags = [(_text(each["begin"]), _old(lark, each)) for each in structures]
        return _triggered(lark, tags, triggers, False, False)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise RequestError(f"'{field}' is not a structural tag: {what}", field) from error


def _old(lark: Lark, structure: dict[str, Any]) -> str:
    schema = structure["schema"] if structure.get("schema") is not None else {}
    return f"{lark.json(schema)} {lark.literal(_text(structure['end']))}"


def _triggered(lark: Lark, tags: list[tuple[str, str]], triggers: Any, at_least_one: bool, one_is_enough: bool) -> str:
    wanted = [_text(trigger) for trigger in triggers]
    if not all(wanted) or not all(any(begin.startswith(trigger) for trigger in wanted) for begin, _ in tags):
        raise ValueError("each tag must begin with one of the triggers, and no trigger is empty")
    if not tags:
        raise ValueError("there is no tag")
    return lark.tags(tags, wanted, at_least_one, one_is_enough)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a text")
    return value


class _Writer:
    """Writes the second form."""

    def __init__(self, lark: Lark) -> None:
        self._lark = lark
        self._depth = 0
        self._types: dict[str, Callable[[dict[str, Any]], str]] = {
            "const_string": lambda format: lark.literal(_text(format["value"])),
            "json_schema": lambda format: lark.json(format["json_schema"]),
            "regex": lambda format: lark.regex(_text(format["pattern"])),
            "grammar": lambda format: lark.lark(_text(format["grammar"])),
            "any_text": lambda format: lark.any_text(),
            "sequence": lambda format: " ".join(map(self.write, format["elements"])),
            "or": lambda format: lark.any_of(map(self.write, format["elements"])),
            "tag": lambda format: f"{lark.literal(_text(format['begin']))} {self._inside(format)}",
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._separated,
        }

    def write(self, format: dict[str, Any]) -> str:
        kind = format["type"]
        if kind not in self._types:
            raise ValueError(f"there is no format {kind!r:.40}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"formats are nested more than {_MAX_DEPTH} times")
        written = self._types[kind](format)
        self._depth -= 1
        return self._lark.rule(written)

    def _inside(self, tag: dict[str, Any]) -> str:
        """What follows the beginning of a tag."""
        end = _text(tag["end"])
        if tag["content"]["type"] == "any_text":
            return self._lark.text_until(end) if end else self._lark.any_text()
        return f"{self.write(tag['content'])} {self._lark.literal(end)}"

    def _triggered_tags(self, format: dict[str, Any]) -> str:
        tags = [(_text(tag["begin"]), self._inside(tag)) for tag in format["tags"]]
        at_least_one, enough = bool(format.get("at_least_one")), bool(format.get("stop_after_first"))
        return _triggered(self._lark, tags, format["triggers"], at_least_one, enough)

    def _separated(self, format: dict[str, Any]) -> str:
        one = self._lark.any_of(self.write({"type": "tag", **tag}) for tag in format["tags"])
        more = "" if format.get("stop_after_first") else f" ({self._lark.literal(_text(format['separator']))} {one})*"
        return f"{one}{more}" if format.get("at_least_one") else f"({one}{more})?"
