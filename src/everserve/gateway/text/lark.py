"""Grammars in the language of llguidance: Lark, with JSON schemas and other grammars in it.

A `Lark` is written rule by rule; what a method returns is an expression for other rules. Special tokens are no text for
the library: it must be told their ids, which is why `literal` cuts them out of texts.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_ANY_TEXT = r"/(.|\n)*/"
_BLANKS = "( |\n[ \t]{0,32})?"  # as people write JSON: without a bound a weak model fills its answer with blanks


class Lark:
    """One grammar."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """`special`: ids of the tokens that are no text."""
        self._special = special
        self._rules: list[str] = []
        self._nested: list[dict[str, str]] = []
        longest_first = sorted(special, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, longest_first))) if special else None

    def text(self, start: str) -> str:
        """The whole grammar, which begins with this expression."""
        lark = "\n".join([f"start: {start}", *self._rules]) + "\n"
        return json.dumps({"grammars": [{"name": "start", "lark_grammar": lark}, *self._nested]})

    def rule(self, expression: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{f'[{attributes}]' if attributes else ''}: {expression}")
        return name

    def json(self, schema: Any, blanks: str | None = None) -> str:
        """A value of this JSON schema. `blanks`: a regular expression for what may stand between its parts."""
        options = {"whitespace_pattern": _BLANKS if blanks is None else blanks}
        guided = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
        return self.rule(f"%json {json.dumps(guided | {'x-guidance': options})}")

    def regex(self, pattern: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: /{_escape_slashes(pattern)}/")
        return name

    def lark(self, grammar: str) -> str:
        """Another grammar, with a start rule of its own; or one in GBNF, with a rule `root`."""
        name = f"g{len(self._nested)}"
        self._nested.append({"name": name, "gbnf" if "::=" in grammar else "lark_grammar": grammar})
        return f"@{name}"

    def literal(self, text: str) -> str:
        """Just this text."""
        pieces: list[str] = []
        end = 0
        for found in self._cut.finditer(text) if self._cut is not None else ():
            pieces += [_quoted(text[end : found.start()]), f"<[{self._special[found.group()]}]>"]
            end = found.end()
        return " ".join(piece for piece in (*pieces, _quoted(text[end:])) if piece) or '""'

    def any_of(self, expressions: Iterable[str]) -> str:
        return self.rule(" | ".join(dict.fromkeys(expressions)))

    def any_text(self) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {_ANY_TEXT}")
        return name

    def text_until(self, mark: str) -> str:
        """Any text up to and with the first such mark."""
        if mark in self._special:
            return f"{self.any_text()} {self.literal(mark)}"
        return self.rule(f"{_ANY_TEXT} {_quoted(mark)}", "lazy")

    def tags(
        self, tags: Sequence[tuple[str, str]], triggers: Sequence[str], at_least_one: bool, is_one_enough: bool
    ) -> str:
        """Any text; where a trigger comes up, the rest of one of the tags: (its beginning, an expression for what
        follows). Tags in the middle of text end when their expressions do."""
        per_trigger = []
        for trigger in triggers:
            rests = [
                f"{self.literal(begin[len(trigger) :])} {rest}" for begin, rest in tags if begin.startswith(trigger)
            ]
            if rests:
                per_trigger.append(f"{self.text_until(trigger)} ({self.any_of(rests)})")
        some = self.any_of(per_trigger)
        if is_one_enough:
            return some if at_least_one else f"({some} | {self.any_text()})"
        return f"({some}){'+' if at_least_one else '*'} {self.any_text()}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escape_slashes(pattern: str) -> str:
    r"""Escapes a regular expression between slashes: `\/` stays, `/` becomes `\/`, and a new line `\n`."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found.group() == "/" else found.group(), pattern, flags=re.S)
    return escaped.replace("\n", r"\n")
