"""Guides: what a stream may say next is a function of its grammar and its tokens."""

import json
import re

import numpy as np
import pytest

from everserve.errors import ModelError, RequestError
from everserve.gateway.text.lark import Lark
from everserve.guides.compiling import Compiled, Compiler
from everserve.guides.guide import Guide, MaskThread, is_allowed
from everserve.guides.vocabulary import read_vocabulary
from everserve.model.bundled import DEMO_MODEL
from everserve.tables.requests import Guided, Thinking
from tests.support.guides import (
    CHARACTERS,
    END,
    GUIDED,
    LISTS,
    OBJECTS,
    VOCAB,
    add,
    guide_of,
    lark,
    text_of,
    toy_compiler,
)
from tests.support.toy import make_engine, run_alone, spec


def allowed(guide: Guide) -> list[int]:
    return np.nonzero(is_allowed(guide.mask(), VOCAB))[0].tolist()


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


@pytest.mark.parametrize("guided", GUIDED)
def test_a_guide_that_is_made_anew_has_the_same_mask(guided: Guided) -> None:
    """After each prefix of random outputs; also if one shares nothing with others, and if a thread computes."""
    rng, thread, compiler = np.random.default_rng(7), MaskThread(), toy_compiler()
    num_compared = 0
    for _ in range(12):
        guide, tokens = Guide(compiler, guided, thread=thread), []
        for _ in range(40):
            mask = guide.mask().copy()
            other = Guide(compiler, guided, tokens)
            assert (mask == other.mask()).all()
            if guided.thinking is None:
                matcher = Compiled(compiler.vocabulary, guided.grammar or "").begin_alone()
                assert matcher.consume_tokens(tokens)
                alone = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: len(mask)].copy()
                assert (is_allowed(alone, END) == is_allowed(mask, END)).all()
            num_compared += 1
            token = int(rng.choice(np.nonzero(is_allowed(mask, VOCAB))[0]))
            if token == END:
                break
            tokens.append(token)
            guide.advance(token)
    thread.close()
    assert num_compared > 60


def test_streams_of_an_engine_follow_their_grammars() -> None:
    for seed in range(5):
        tokens = run_alone(spec("a", [1, 2], max_tokens=60, temperature=1.0, seed=seed, guided=LISTS))
        assert re.fullmatch(r"[a-z]{2,9}(,[0-9]+){0,4}", text_of(tokens)) and tokens[-1] == END
        tokens = run_alone(spec("a", [1, 2], max_tokens=60, temperature=1.0, seed=seed, guided=OBJECTS))
        assert tokens[-1] != END or isinstance(json.loads(text_of(tokens)), dict)


def test_an_answer_may_end_only_where_its_grammar_may() -> None:
    guide = Guide(toy_compiler(), Guided(grammar=lark('start: "ab" "c"?'), end_ids=(END,)))
    assert allowed(guide) == ids("a")
    guide.advance(ids("a")[0])
    assert allowed(guide) == ids("b")
    guide.advance(ids("b")[0])
    assert allowed(guide) == [*ids("c"), END]
    guide.advance(ids("c")[0])
    assert allowed(guide) == [END]


def test_thinking_is_free_and_its_budget_is_forced() -> None:
    """The grammar begins behind it, and the answer cannot end before."""
    stop_thinking = ids("%")[0]
    guided = Guided(grammar=lark('start: "x"'), end_ids=(END,), thinking=Thinking(end_id=stop_thinking, max_tokens=3))
    guide = Guide(toy_compiler(), guided)
    for token in ids("abc"):
        assert allowed(guide) == list(range(END))
        guide.advance(token)
    assert allowed(guide) == [stop_thinking]
    guide.advance(stop_thinking)
    assert allowed(guide) == ids("x")
    early = Guide(toy_compiler(), guided, [*ids("a"), stop_thinking])
    assert allowed(early) == ids("x")
    without_grammar = Guide(toy_compiler(), Guided(thinking=guided.thinking), ids("abc"))
    assert allowed(without_grammar) == [stop_thinking]
    without_grammar.advance(stop_thinking)
    assert allowed(without_grammar) == list(range(VOCAB))


def test_a_dead_end_is_the_end_of_its_stream_only() -> None:
    """min_tokens forbids the only token that the grammar allows."""
    engine, _ = make_engine()
    dead = spec(
        "dead", [1, 2], max_tokens=20, min_tokens=9, guided=Guided(grammar=lark('start: "abc"'), end_ids=(END,))
    )
    other = spec("other", [3], max_tokens=12)
    add(engine, dead)
    add(engine, other)
    tokens: dict[str, list[int]] = {"dead": [], "other": []}
    failures = []
    while engine.has_work:
        result = engine.step()
        failures += result.failed
        for output in result.outputs:
            assert output.token is not None
            tokens[output.id].append(output.token)
        engine.check()
    assert text_of(tokens["dead"]) == "abc" and tokens["other"] == run_alone(other)
    (failure,) = failures
    assert (
        failure.id == "dead" and failure.is_dead_end and "after 3 tokens: its grammar allows no token" in failure.reason
    )


def test_bad_words_never_come() -> None:
    free = run_alone(spec("a", [1, 2], max_tokens=30))
    words = ((free[0],), tuple(free[3:5]))
    tokens = run_alone(spec("a", [1, 2], max_tokens=30, bad_words=words))
    assert free[0] not in tokens and not any(tuple(tokens[i : i + 2]) == words[1] for i in range(len(tokens)))


def test_known_output_that_the_grammar_does_not_allow() -> None:
    with pytest.raises(RequestError):
        guide_of(spec("a", [1], guided=LISTS).after(ids("a1")))


def test_a_guide_that_shares_a_full_automaton_is_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other streams have found out about a grammar must not decide whether this one reaches a limit."""
    guide = Guide(toy_compiler(), LISTS)
    follower = guide._follower
    assert follower is not None
    monkeypatch.setattr(follower, "_matcher", follower._compiled.begin())
    follower._matcher.consume_token(END)  # it is in error from now on
    guide.advance(ids("a")[0])
    assert allowed(guide) == allowed(Guide(toy_compiler(), LISTS, ids("a")))


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("start: x", "unknown name"),
        ("start: /(/", "regex"),
        ('start: %json {"type": "nonsense"}', "Invalid type"),
        ("no grammar at all", "Expected token"),
    ],
)
def test_what_is_no_grammar_says_why(grammar: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        Guide(toy_compiler(), Guided(grammar=lark(grammar), end_ids=(END,)))


def test_grammars_in_gbnf() -> None:
    writer = Lark({})
    grammar = writer.text(writer.lark('root ::= "yes" | "no" "!"*'))
    guide = Guide(toy_compiler(), Guided(grammar=grammar, end_ids=(END,)), ids("no!!"))
    assert allowed(guide) == [*ids("!"), END]


def test_special_tokens_are_no_text() -> None:
    writer = Lark({"<end>": END})
    grammar = writer.text(f"{writer.literal('a<end>b')} {writer.any_text()}")
    guide = Guide(toy_compiler(), Guided(grammar=grammar))
    for token in (ids("a")[0], END, ids("b")[0]):
        assert allowed(guide) == [token]
        guide.advance(token)
    assert END not in allowed(guide) and len(allowed(guide)) == END


def test_the_bundled_vocabulary(tmp_path) -> None:
    vocabulary = read_vocabulary(DEMO_MODEL, 4100)  # a model may have more rows than tokens
    assert vocabulary.size == 4100 and vocabulary.tokenizer.vocab_size >= 4100 > vocabulary.end
    guided = Guided(grammar=lark("start: /(.|\\n)*/"), end_ids=(0,))
    mask = is_allowed(Guide(Compiler(vocabulary), guided).mask(), 4100)
    assert mask[0] and not mask[4096:].any(), "ids without a text, and the mark of the end, are never allowed"
    with pytest.raises(ModelError, match="no grammar can be used"):
        read_vocabulary(tmp_path, 10)
