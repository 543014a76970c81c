"""After a mask: what a stream says then must be what an exact run says, given all tokens delivered up to there.

Such a run is an ordinary request, with these tokens as the end of its prompt. That is the same only for greedy streams
without penalties: a sampled token depends on its number, and penalties on what is output and what is prompt. The others
are counted; `tests/property/test_masks.py` is about all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from everserve.chaos.answers import Answer
from everserve.chaos.requests import Request

_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
_ENDINGS = ("stop", "include_stop_str_in_output", "logprobs", "n")


@dataclass(frozen=True)
class Continuation:
    """Tokens that followed marked ones, and the request that must be answered by them."""

    where: str
    request: Request
    tokens: tuple[int, ...]


def can_ask(request: Request) -> bool:
    """Whether a run that goes on from given tokens can be asked for."""
    return (
        "prompt" in request.body
        and request.body["temperature"] == 0
        and not any(name in request.body for name in _PENALTIES)
    )


def continuations(request: Request, answer: Answer, where: str) -> Iterator[Continuation]:
    """The continuations of all choices of an answer, complete or not."""
    for choice in answer.choices:
        for first, end in choice.exact_again:
            tokens = choice.token_ids
            body = {name: value for name, value in request.body.items() if name not in _ENDINGS}
            body |= {"prompt": [*body.get("prompt", ()), *tokens[:first]], "max_tokens": end - first}
            yield Continuation(
                f"{where}, from token {first} on", Request(request.number, body), tuple(tokens[first:end])
            )
