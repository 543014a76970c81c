"""Structured outputs: the real `openai` package against the real server, and vLLM's fields."""

import json
import re
from enum import Enum
from typing import Any

import openai
import pydantic
import pytest

from tests.support.cluster import metric

MESSAGES: Any = [{"role": "user", "content": "It was a bright morning, and"}]
PROMPT = MESSAGES[0]["content"]


class Kind(Enum):
    OLD = "old"
    NEW = "new"


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(pattern="^[A-Z][a-z]{2,8}$")
    age: int = pydantic.Field(ge=0, le=150)
    kind: Kind
    friends: list[Kind] = pydantic.Field(max_length=2)


@pytest.fixture(scope="module")
def client(server) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def asked(server, **fields: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": MESSAGES, "max_tokens": 300, "seed": 3, **fields}


def test_parse(client: openai.OpenAI, server) -> None:
    """Each of several choices is what the class says."""
    answer = client.chat.completions.parse(**asked(server, n=3, temperature=1.0), response_format=Person)
    people = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(person, Person) for person in people) and len({str(person) for person in people}) > 1


def test_a_parsed_stream(client: openai.OpenAI, server) -> None:
    whole = client.chat.completions.parse(**asked(server), response_format=Person)
    with client.chat.completions.stream(**asked(server), response_format=Person) as events:
        types = {event.type for event in events}
        final = events.get_final_completion()
    assert "content.delta" in types and "content.done" in types
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


def test_any_json(client: openai.OpenAI, server) -> None:
    answer = client.chat.completions.create(
        **asked(server, response_format={"type": "json_object"}, max_tokens=400, temperature=0.3)
    )
    content, ended = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert content is not None and content.lstrip().startswith("{")
    assert ended == "length" or isinstance(json.loads(content), dict)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": r"[0-9]{3}/[a-z]{2,4}"}}, r"[0-9]{3}/[a-z]{2,4}"),
        ({"structured_outputs": {"choice": ["red", "dark green", "é\n"]}}, "red|dark green|é\n"),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no" "!"+'}}, "yes|no!+"),
        ({"structured_outputs": {"json": '{"enum": [1, "two"]}'}}, '1|"two"'),
        ({"guided_regex": "(ab|cd){2}"}, "(ab|cd){2}"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"guided_grammar": 'start: "<" /[a-z]{1,9}/ ">"'}, "<[a-z]{1,9}>"),
        ({"guided_json": {"const": "here"}}, '"here"'),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {
                        "type": "sequence",
                        "elements": [
                            {"type": "const_string", "value": "It is "},
                            {
                                "type": "tag",
                                "begin": "<n>",
                                "content": {"type": "regex", "pattern": "[0-9]{1,5}"},
                                "end": "</n>",
                            },
                        ],
                    },
                }
            },
            "It is <n>[0-9]{1,5}</n>",
        ),
    ],
)
def test_every_way_of_guiding(client: openai.OpenAI, server, fields: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(
        model=server.model, prompt=PROMPT, max_tokens=200, temperature=0.8, seed=5, n=2, extra_body=fields
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and re.fullmatch(pattern, choice.text), choice.text


def test_beside_other_parameters(client: openai.OpenAI, server) -> None:
    """A stop string, penalties, biases, logprobs and min_tokens mean what they mean elsewhere."""
    regex = {"extra_body": {"structured_outputs": {"regex": "[a-z]{1,40}"}, "min_tokens": 4}}
    answer = client.completions.create(
        model=server.model, prompt=PROMPT, max_tokens=60, logprobs=2, frequency_penalty=0.5, logit_bias={"10": 5},
        seed=1, **regex,
    )  # fmt: skip
    choice = answer.choices[0]
    assert re.fullmatch("[a-z]{1,40}", choice.text) and answer.usage is not None
    assert answer.usage.completion_tokens >= 4 and choice.logprobs is not None and choice.logprobs.token_logprobs
    text = choice.text
    stopped = client.completions.create(
        model=server.model, prompt=PROMPT, max_tokens=60, frequency_penalty=0.5, logit_bias={"10": 5}, seed=1,
        stop=text[-1], extra_body={"structured_outputs": {"regex": "[a-z]{1,40}"}},
    )  # fmt: skip
    assert text.startswith(stopped.choices[0].text) and text[-1] not in stopped.choices[0].text


@pytest.mark.parametrize(
    ("fields", "field", "why"),
    [
        ({"guided_regex": "(("}, "guided_regex", "invalid regex"),
        ({"guided_json": '{"type": '}, "guided_json", "is not JSON"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json", "Invalid type"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "has to end"),
        ({"guided_choice": ["a"], "min_tokens": 3}, "min_tokens", "allows 1 at most"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided in one way"),
        ({"guided_regex": "ab", "min_tokens": 9}, None, "cannot go on after [12] tokens: its grammar allows no token"),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "x"}}}}, None, "no format 'x'"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json", "makes a grammar of"),
    ],
)
def test_what_cannot_be_guided(
    client: openai.OpenAI, server, fields: dict[str, Any], field: str | None, why: str
) -> None:
    """A 400 that says why; and no worker has noticed."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=server.model, prompt=PROMPT, max_tokens=50, extra_body=fields)
    assert re.search(why, str(caught.value)) and (field is None or caught.value.param == field)
    assert metric(server, "everserve_failovers_total") == 0
