"""Grammar text -> Compiled, within limits.

A grammar comes from a client. What it may cost is bounded: its size, the work of compiling it (the library counts it as
fuel), the work and the memory of each mask. The numbers are part of what a stream says: a mask that exceeds one is an
error of its stream, so gateway and workers use the same.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable

import llguidance
from llguidance import LLMatcher, LLParserLimits

from everserve.errors import RequestError
from everserve.guides.vocabulary import Vocabulary

VERSION: str = llguidance.__version__
MAX_GRAMMAR_BYTES = 1 << 18
_MAX_REASON = 400  # characters
_NUM_KEPT = 64  # grammars
_LIMITS = LLParserLimits(
    max_grammar_size=200_000,  # symbols
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=200_000,  # about 15 ms
    step_max_items=50_000,  # a few ms
    max_lexer_states=30_000,  # of 1 to 2 KB
    verbose_errors=False,
)


class Compiled:
    """One grammar for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        """A RequestError says what is wrong with it."""
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise RequestError(f"The grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_BYTES} are supported.")
        self.vocabulary = vocabulary
        self._grammar = grammar
        self._first = self._compile()

    def begin(self) -> LLMatcher:
        """A matcher at the grammar's beginning. What one finds out about the grammar on its way is known to all."""
        return self._first.deep_copy()

    def begin_alone(self) -> LLMatcher:
        """At its beginning, and sharing nothing: whether it reaches a limit depends on its own tokens only."""
        return self._compile()

    def _compile(self) -> LLMatcher:
        matcher = LLMatcher(self.vocabulary.tokenizer, _in_lark(self._grammar), log_level=0, limits=_LIMITS)
        check(matcher)
        return matcher


def _in_lark(grammar: str) -> str:
    """Where a grammar contains others in GBNF, these are translated. That takes as long as its text says: here, where
    time is bounded, not in the gateway."""
    if '"gbnf"' not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415 (rare)

    whole = json.loads(grammar)
    for part in whole["grammars"]:
        if (text := part.pop("gbnf", None)) is not None:
            try:
                part["lark_grammar"] = any_to_lark(text)
            except Exception as error:  # it says in many ways that a text is no grammar
                raise RequestError(_shortened(str(error))) from error
    return json.dumps(whole)


def check(matcher: LLMatcher) -> None:
    """Raise what the library says of it."""
    if matcher.is_error():
        raise RequestError(_shortened(matcher.get_error()))


def consume(matcher: LLMatcher, tokens: Iterable[int]) -> None:
    """Tokens that were allowed one after the other."""
    matcher.consume_tokens(list(tokens))
    check(matcher)


class Compiler:
    """Compiles for one vocabulary, and keeps the grammars that were used last."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()

    def compile(self, grammar: str) -> Compiled:
        key = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = Compiled(self.vocabulary, grammar)
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found


def _shortened(reason: str) -> str:
    """The reason without the grammar, which the library quotes."""
    line = " ".join(reason.partition("\n   1 | ")[0].split())
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + "…"
