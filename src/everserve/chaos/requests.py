"""What clients ask: a catalogue of requests made from the seed, each with one right answer.

Short and long prompts and outputs, greedy and sampled, some with two choices, logprobs or stop strings, some that
follow a schema, some that share a prefix; then calls of tools, and responses in the background. How a request is asked
is the client's choice each time: streamed, whole, cancelled, broken off and resumed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Prompts are made of this text's tokens, whatever the model's vocabulary.
TEXT = (
    "It was a bright evening in the capital, and the snow which had fallen since the morning lay upon the roofs, the "
    "bridges and the carriages that waited before the theatre. Nobody spoke. An old man in a grey coat, who had come "
    "on foot from the other side of the river, stood at the corner and counted the windows: seven, eleven, nineteen of "
    'them were lit. "You are late," said a voice behind him; "we had given you up." He turned, smiled, and took off '
    "his hat. When do the others arrive? By what road? Have they letters, money, anything that could be found? The "
    "questions came quickly; he answered each with a nod, as if the wind might carry words to somebody who must not "
    "hear them. At length the bells began, first one, then all, and under their noise he told what he had seen."
)

NUM_REQUESTS = 32
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
_NUM_CALLS, _NUM_IN_BACKGROUND = 4, 3
_PREFIX_TOKENS = 150  # shared by some
_PROMPTS = ((1, 20), (30, 120), (200, 500), (700, 1500))  # tokens
_OUTPUTS = ((1, 1), (2, 16), (20, 80), (80, 160), (200, 400))
_LONG_OUTPUT = 100  # of a long prompt, at most: its computation is what matters
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "array", "minItems": 40, "items": {"type": "string", "pattern": "^[a-z]{3,9}$"}},
    {"type": "object"},
    {
        "type": "array",
        "minItems": 20,
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    },
)
_STOPS = ([" the"], [",", " and"], [". "], ["zzz", "\n"])


@dataclass(frozen=True)
class Request:
    """One entry of the catalogue. The same one gets the same tokens every time."""

    number: int
    body: dict[str, Any]
    path: str = COMPLETIONS

    @property
    def is_background(self) -> bool:
        """It is asked for, and looked at again and again until it has ended."""
        return bool(self.body.get("background"))

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))

    def __str__(self) -> str:
        hidden = ("model", "prompt", "messages", "input", "tools", "return_token_ids")
        extra = {key: value for key, value in self.body.items() if key not in hidden}
        what = f"{len(self.body['prompt'])} prompt tokens" if "prompt" in self.body else self.path
        return f"request {self.number} ({what}, {extra})"


def make_catalogue(
    seed: int,
    model: str,
    vocabulary: Sequence[int],
    max_model_len: int,
    num: int = NUM_REQUESTS,
    *,
    calls_tools: bool = False,
) -> list[Request]:
    """All distinct requests of a run. `vocabulary`: token ids that prompts may consist of. `calls_tools`: the model's
    template, or a flag, says how."""
    dice = random.Random(f"everserve chaos/requests/{seed}")
    prefix = dice.choices(vocabulary, k=min(_PREFIX_TOKENS, max_model_len // 4))
    found = [Request(i, _make_body(i, dice, model, vocabulary, prefix, max_model_len)) for i in range(num)]
    num_most = max_model_len // 4
    for i in range(_NUM_CALLS if calls_tools else 0):
        found.append(Request(len(found), _call(i, dice, model, num_most), CHATS))
    for i in range(_NUM_IN_BACKGROUND):
        found.append(Request(len(found), _in_background(i, dice, model, num_most), RESPONSES))
    return found


def tool_probe(model: str) -> dict[str, Any]:
    """A request that a server answers if it can call tools."""
    return {**_call(0, random.Random(0), model, 1), "max_tokens": 1}


def _said(dice: random.Random) -> str:
    """A part of the text."""
    at = dice.randrange(len(TEXT) - 120)
    return TEXT[at : at + dice.randint(20, 120)]


def _call(i: int, dice: random.Random, model: str, num_most: int) -> dict[str, Any]:
    """A chat that must end with a call, or with several; greedy or sampled."""
    days = {"type": "array", "items": {"enum": ["mon", "tue", "wed"]}, "minItems": 4, "maxItems": 4 + 4 * i}
    city = {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"}
    parameters = {
        "type": "object",
        "properties": {"city": city, "days": days},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    return {
        "model": model,
        "messages": [{"role": "user", "content": _said(dice)}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": True}}],
        "tool_choice": "required",
        "parallel_tool_calls": i % 2 == 1,
        "max_tokens": min(dice.randint(60, 300), num_most),
        "return_token_ids": True,
        "temperature": 0.8 if i // 2 else 0.0,
        "seed": dice.randrange(1 << 32),
    }


def _in_background(i: int, dice: random.Random, model: str, num_most: int) -> dict[str, Any]:
    return {
        "model": model,
        "input": _said(dice),
        "background": True,
        "max_output_tokens": min(dice.randint(40, 240), num_most),
        "ignore_eos": i % 2 == 0,
        "temperature": 0.0 if i == 0 else 0.9,
        "seed": dice.randrange(1 << 32),
    }


def _make_body(
    i: int, dice: random.Random, model: str, vocabulary: Sequence[int], prefix: list[int], max_model_len: int
) -> dict[str, Any]:
    """Properties follow from the number, so that every catalogue has all of them; only lengths and values are drawn."""
    num_prompt = min(dice.randint(*_PROMPTS[i % len(_PROMPTS)]), max_model_len // 2)
    num_output = dice.randint(*_OUTPUTS[i % len(_OUTPUTS)])
    if num_prompt > _PROMPTS[-1][0]:
        num_output = min(num_output, _LONG_OUTPUT)
    shared = prefix if i % 5 in (1, 2) and num_prompt <= max_model_len // 4 else []
    prompt = shared + dice.choices(vocabulary, k=num_prompt)
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": min(num_output, max_model_len - len(prompt)),
        "ignore_eos": i % 3 != 0,
        "return_token_ids": True,
        "temperature": 0.0,
    }
    if i % 2:
        body |= {"temperature": round(dice.uniform(0.5, 1.2), 2), "top_p": 0.95, "seed": dice.randrange(1 << 32)}
    if i % 8 in (3, 6):
        body |= {"frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.1}
    if i % 8 == 7:
        body |= {"n": 2}
    if i % 6 == 4:
        body |= {"logprobs": dice.randint(0, 4)}
    if i % 8 in (2, 5):
        body |= {"ignore_eos": False, "guided_json": _SCHEMAS[i // 8 % len(_SCHEMAS)]}
    if i % 7 in (3, 5):
        body |= {"stop": dice.choice(_STOPS), "include_stop_str_in_output": dice.random() < 0.5}
    return body
