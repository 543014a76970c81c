"""What a client asked for, as every process sees it.

One `RequestSpec` is one token stream. A client's request with `n` choices or several prompts becomes
several specs in the gateway; they find each other's KV through the prefix cache.

A spec does not depend on the worker that runs it: every worker produces the same stream from it.
"""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    Tokens = array[int]
else:
    Tokens = array  # before Python 3.12 it does not say of what

MAX_LOGPROBS = 20
MAX_STOP_IDS = 64


def as_tokens(ids: Iterable[int] = ()) -> Tokens:
    """Four bytes each, that can be copied without a look at them."""
    return array("i", ids)


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The output begins with reasoning, up to a token that ends it."""

    end_id: int
    max_tokens: int | None = None  # then the end is forced
    start_id: int | None = None  # it only begins if this is the first token; None: it has begun in the prompt


class Guided(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the output must look like (guides/): first reasoning, if there is any, then what the grammar says."""

    grammar: str | None = None  # as llguidance reads it
    end_ids: tuple[int, ...] = ()  # they end an answer, where the grammar may end
    thinking: Thinking | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to choose tokens. The gateway validates the values, and rejects bad ones with HTTP 400."""

    max_tokens: int  # >= 0; 0 only makes sense together with prompt_logprobs
    seed: int = 0  # with the token index, the only source of randomness; 0 <= seed < 2**63
    min_tokens: int = 0  # no stop id is sampled before this many tokens
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_ids: tuple[int, ...] = ()  # the model's end-of-sequence ids included, unless ignore_eos
    logprobs: int | None = None  # how many alternatives beside the chosen token; None = no logprobs
    prompt_logprobs: int | None = None  # the same for each prompt token (`echo`)
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens in a row that the output must not contain
    guided: Guided | None = None
    pooled: bool = False  # no tokens (max_tokens=0): the hidden state after the last token of the prompt


class Masked(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """From which position on a stream's KV is not exact: it was computed under a mask, or from KV that was.

    `mask_id` is the mask under which that began, and part of what certifies the KV in logs and caches: it never passes
    for exact KV.
    """

    position: int
    mask_id: int


class Flow(NamedTuple):
    """The request and the API key that a stream belongs to, and the key's weight, where places are shared
    (plan/fairness.py)."""

    key: str = ""
    request: int = 0  # counted by the gateway
    weight: float = 1.0  # of the key; the same for all of its requests
    priority: int = 0  # among the requests of its key: those with a lower one come first


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token stream: its id, its prompt, what it has produced so far and how to continue it."""

    id: str
    prompt: Tokens  # no list, here and below: when a worker dies, hundreds of streams go elsewhere at once
    params: SamplingParams
    known: Tokens = msgspec.field(default_factory=as_tokens)  # that the client has; never sampled again
    masked: Masked | None = None  # what its last worker has said of its KV
    flow: Flow = Flow()
    cache_salt: bytes = b""  # streams share KV only with those that have the same

    def after(self, known: Iterable[int], masked: Masked | None = None) -> "RequestSpec":
        """The same stream, when its client has these output tokens."""
        return msgspec.structs.replace(self, known=as_tokens(known), masked=masked)
