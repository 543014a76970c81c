"""Answers of every format, split at every place: the same reasoning, text and calls."""

import json

import numpy as np
import pytest

from everserve.gateway.text.lark import Lark
from everserve.gateway.text.reading.answers import AnswerReader, Reading
from everserve.gateway.text.reading.format import Tool, write_calls, write_text_and_calls
from everserve.gateway.text.reading.formats import FORMATS, format_of, reasoning_of
from everserve.gateway.text.reading.parts import Argued, Called, Part, Thought
from everserve.gateway.text.reading.reasoning import REASONING
from everserve.guides.guide import Guide, is_allowed
from everserve.tables.requests import Guided
from tests.support.guides import CHARACTERS, END, toy_compiler

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "more": {"type": "object"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = {"weather": Tool("weather", PARAMETERS), "now": Tool("now")}
Read = tuple[str, str, list[tuple[str, str]]]  # reasoning, text, calls


def merged(parts: list[Part]) -> Read:
    thought, said = [], []
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, Called):
            calls.append((part.name, ""))
        elif isinstance(part, Argued):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
        else:
            (thought if isinstance(part, Thought) else said).append(part.text)
    return "".join(thought), "".join(said), calls


def read(reading: Reading, pieces: list[str]) -> Read:
    reader = AnswerReader(reading, "x")
    parts = [part for i, piece in enumerate(pieces) for part in reader.push(piece, is_last=i == len(pieces) - 1)]
    return merged(parts)


def read_however_split(reading: Reading, text: str) -> Read:
    whole = read(reading, [text])
    assert read(reading, [*text, ""]) == whole, "one character at a time"
    for at in range(len(text) + 1):
        assert read(reading, [text[:at], text[at:]]) == whole, f"split at {at}"
    return whole


ONE = '{"city": "Zürich }\\" {[", "days": 3}'
TWO = '{"city": "Bern", "days": 1, "more": {"a": [1, {"b": "]"}]}}'
CASES: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "hermes": [
        (f'<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>', "", [("weather", ONE)]),
        (
            f'Let me see.\n\n<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>\n<tool_call>'
            f'{{"arguments": {TWO}, "name": "weather"}}</tool_call>\n',
            "Let me see.",
            [("weather", ONE), ("weather", TWO)],
        ),
        ('<tool_call>{"name": "now", "arguments": {}}</tool_call> so', "so", [("now", "{}")]),
        ("no <tool_ call at all < \n", "no <tool_ call at all < \n", []),
        ("<tool_call>nothing", "<tool_call>nothing", []),
        ('<tool_call>{"name": "now", "arguments": {"a": "cut', "", [("now", '{"a": "cut')]),
    ],
    "llama3_json": [
        (f'{{"name": "weather", "parameters": {ONE}}}', "", [("weather", ONE)]),
        (
            f'<|python_tag|>{{"name": "weather", "parameters": {ONE}}}; {{"name": "now", "parameters": {{}}}}',
            "",
            [("weather", ONE), ("now", "{}")],
        ),
        ("It is {fine}.", "It is {fine}.", []),
    ],
    "pythonic": [
        (
            "[weather(city='Bern', days=1, more={'a': [1, True]}), now()]",
            "",
            [("weather", '{"city": "Bern", "days": 1, "more": {"a": [1, true]}}'), ("now", "{}")],
        ),
        ('[weather(city="B", days=true)]', "", [("weather", '{"city": "B", "days": true}')]),
        ("[1, 2] is a list", "[1, 2] is a list", []),
        ("Fine [weather].", "Fine [weather].", []),
    ],
    "mistral": [
        (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ONE}}}, {{"name": "now", "arguments": {{}}}}]', "",
         [("weather", ONE), ("now", "{}")]),
        (f"Well.[TOOL_CALLS]weather{ONE}[TOOL_CALLS]now[ARGS]{{}}", "Well.", [("weather", ONE), ("now", "{}")]),
        (f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{ONE}", "", [("weather", ONE)]),
        ("[TOOL", "[TOOL", []),
    ],
    "glm45": [
        (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern\n\"x\"</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
            "",
            [("weather", '{"city": "Bern\\n\\"x\\"", "days": 2}'), ("now", "{}")],
        ),
        ("Only text.", "Only text.", []),
        (
            "Wait.\n<tool_call>weather<arg_key>more</arg_key>"
            '<arg_value>{"a": ["</b>", "<arg_value>"]}</arg_value>'
            "<arg_key>unit</arg_key><arg_value>C</arg_value></tool_call>",
            "Wait.",
            [("weather", '{"more": {"a": ["</b>", "<arg_value>"]}, "unit": "C"}')],
        ),
        ("1 < 2 <tool and <tool_calls", "1 < 2 <tool and <tool_calls", []),
    ],
    "minimax_m2": [
        (
            'So:\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">007</parameter>\n'
            '<parameter name="days">7</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
            "So:",
            [("weather", '{"city": "007", "days": 7}'), ("now", "{}")],
        ),
        ("a <minimax of text", "a <minimax of text", []),
        (
            '<minimax:tool_call><invoke name="weather"><parameter name="more">{"x": null}</parameter>'
            '<parameter name="city">1 < 2 & "3"\n\n</parameter></invoke></minimax:tool_call>',
            "",
            [("weather", '{"more": {"x": null}, "city": "1 < 2 & \\"3\\"\\n\\n"}')],
        ),
    ],
    "qwen3_coder": [
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n7\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            "",
            [("weather", '{"city": "Bern", "days": 7}'), ("now", "{}")],
        ),
        ("<tool_calls> <function= is text", "<tool_calls> <function= is text", []),
        (
            "First.\n\n<tool_call>\n<function=weather>\n<parameter=city>\ntwo\nlines </param\n</parameter>\n"
            "<parameter=more>\n[1, true]\n</parameter>\n</function>\n</tool_call>",
            "First.",
            [("weather", '{"city": "two\\nlines </param", "more": [1, true]}')],
        ),
    ],
    "deepseek_v3": [
        (
            f"Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ONE}\n```<｜tool▁call▁end｜>"
            "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "Hm.",
            [("weather", ONE), ("now", "{}")],
        ),
        ("a <｜tool or ｜", "a <｜tool or ｜", []),
    ],
    "deepseek_v31": [
        (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ONE}<｜tool▁call▁end｜><｜tool▁call▁begin｜>"
            "now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [("weather", ONE), ("now", "{}")],
        ),
    ],
    "openai": [
        (
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + ONE + "<|call|>"
            "<|start|>assistant to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}",
            "",
            [("weather", ONE), ("now", "{}")],
        ),
        ("<|channel|>final<|message|>Fine.", "Fine.", []),
        ("Just text", "Just text", []),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "said", "calls"), [(name, *case) for name in CASES for case in CASES[name]])
def test_calls_of_every_format(name: str, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    reading = Reading(format=FORMATS[name], tools=TOOLS)
    thought, found_said, found = read_however_split(reading, text)
    assert (thought, found_said) == ("", said)
    assert [(call, _loaded(arguments)) for call, arguments in found] == [(c, _loaded(a)) for c, a in calls]


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


WRITTEN = {  # as models write arguments that are JSON
    "hermes": '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": %s}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n%s\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "openai": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>%s<|call|>",
}
ARGUMENTS = (
    "{}",
    '{ "city" :\n\t"" }',
    '{"city": "\\u00e9\\n\\\\", "days": -1.5e3, "unit": null, "more": true}',
    '{"more": [[], [{}], "\\"}]", {"a": {"b": {"c": "}{"}}}]}',
    '{"city": "</tool_call> [TOOL_CALLS] ; {\\"name\\": 1} ``` 日本 🎉"}',
)


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", WRITTEN)
def test_arguments_are_what_the_model_wrote(name: str, arguments: str) -> None:
    """To the byte, blanks and escapes included, wherever the text is split."""
    reading = Reading(format=FORMATS[name], tools=TOOLS)
    text = WRITTEN[name] % arguments
    assert read_however_split(reading, text) == ("", "", [("weather", arguments)])


def test_only_the_first_call_counts_if_the_client_says_so() -> None:
    text, _, calls = CASES["hermes"][1]
    assert read(Reading(format=FORMATS["hermes"], tools=TOOLS, is_one=True), [text])[2] == calls[:1]


@pytest.mark.parametrize(
    ("text", "is_inside", "thought", "said"),
    [
        ("<think>\nOne, two.\n</think>\n\nThree.", False, "One, two.", "Three."),
        ("One <b>\n</think>Three.", True, "One <b>", "Three."),
        ("Three. <think>", False, "", "Three. <think>"),
        ("<think>cut", False, "cut", ""),
        ("</think>x", True, "", "x"),
        (" <thin", False, "", " <thin"),
    ],
)
def test_reasoning(text: str, is_inside: bool, thought: str, said: str) -> None:
    reading = Reading(reasoning=REASONING["qwen3"], is_inside=is_inside)
    assert read_however_split(reading, text) == (thought, said, [])
    hidden = Reading(reasoning=REASONING["qwen3"], is_inside=is_inside, shows_reasoning=False)
    assert read(hidden, [text]) == ("", said, [])


def test_reasoning_then_calls() -> None:
    reading = Reading(format=FORMATS["hermes"], reasoning=REASONING["qwen3"], tools=TOOLS)
    text = "<think>a <tool_call></think>\n" + CASES["hermes"][0][0]
    assert read_however_split(reading, text) == ("a <tool_call>", "", CASES["hermes"][0][2])
    channels = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + CASES["openai"][0][0]
    assert read_however_split(Reading(format=FORMATS["openai"]), channels) == ("Hm.", "", CASES["openai"][0][2])


def test_ids_of_calls_follow_from_the_answer() -> None:
    reading = Reading(format=FORMATS["mistral"])
    assert len(AnswerReader(reading, "a").call_id(0)) == 9
    one, same, other = (AnswerReader(Reading(), name).call_id(1) for name in ("a", "a", "b"))
    assert one == same != other and one.startswith("call_")


@pytest.mark.parametrize("name", sorted({format.name for format in FORMATS.values()}))
def test_what_a_grammar_allows_is_read(name: str) -> None:
    """Walking through each grammar by the shortest way gives a call that the reader reads."""
    format = FORMATS[name]
    properties = {"unit": {"type": "string", "enum": ["C"]}, "n": {"const": 7}}
    schema = {"type": "object", "properties": properties, "required": ["unit", "n"], "additionalProperties": False}
    tool = Tool("weather", schema)
    lark = Lark({})
    grammar = lark.text(write_calls(format, lark, [tool], is_one=True))
    if "deepseek" in name:  # the toy's tokens are ASCII
        text = _walk(grammar.replace("\\uff5c", "|").replace("\\u2581", "_"))
        text = text.replace("|", "｜").replace("_", "▁")
    else:
        text = _walk(grammar)
    ((called, arguments),) = read(Reading(format=format, tools={"weather": tool}), [text])[2]
    assert called == "weather" and json.loads(arguments) == {"unit": "C", "n": 7}
    both = Lark({})
    Guide(toy_compiler(), Guided(grammar=both.text(write_text_and_calls(format, both, [tool], is_one=False))))


def _walk(grammar: str, prefers: str = "<[{wc") -> str:
    """What must come, and where there is a choice one of these characters, to where the grammar may end."""
    guide, text = Guide(toy_compiler(), Guided(grammar=grammar, end_ids=(END,))), ""
    while len(text) < 400:
        allowed = np.nonzero(is_allowed(guide.mask(), END + 1))[0].tolist()
        if END in allowed:
            return text
        best = next((CHARACTERS.index(c) for c in prefers if CHARACTERS.index(c) in allowed), allowed[0])
        text += CHARACTERS[best]
        guide.advance(best)
    raise AssertionError(text)


def test_which_format_a_template_writes() -> None:
    assert format_of("{% if tools %}<tool_call>") == "hermes" and format_of("<tool_call>") is None
    assert format_of("tools <tool_call> <arg_key>") == "glm45" and format_of("tools [TOOL_CALLS]") == "mistral"
    assert format_of("tools") is None and format_of(None) is None
    assert reasoning_of("x</think>") is not None and reasoning_of("x") is None
