"""Request -> SamplingParams: defaults, seeds, and the checks that need to know the model.

Where a request leaves temperature, top_p, top_k, min_p or repetition_penalty out, the value comes from the model's
generation_config.json, as in vLLM, and otherwise is neutral.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from everserve.errors import ModelError, RequestError
from everserve.gateway.http.errors import not_supported
from everserve.gateway.http.requests import ONLY_FALSE, UNSUPPORTED, ChatRequest, CompletionRequest, GenerationRequest
from everserve.gateway.text.tokenizer import too_long
from everserve.gateway.text.tokenizer_files import read_json
from everserve.tables.requests import MAX_STOP_IDS, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
_GREEDY_BELOW = 1e-5  # a smaller temperature only overflows
_SEED_BITS = 63
MAX_PROMPT_SCORES = 1 << 19  # of one prompt
MAX_REPEATED_BYTES = 256 << 20  # of one prompt, in all choices of an answer
_SCORE_BYTES = 24  # a token's text and a number, as JSON
_ENTRY_BYTES = 80  # the same in `prompt_logprobs`, with names
_ID_BYTES = 7
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What the model's authors recommend, and the tokens that end its answers."""

    eos_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What this server and its model can do."""

    max_total_tokens: int  # prompt and output together
    vocab_size: int
    max_logprobs: int


def read_defaults(model: str, tokenizer_eos_id: int | None) -> GenerationDefaults:
    """generation_config.json; without one, config.json at least names the end-of-sequence tokens."""
    config = read_json(Path(model) / "generation_config.json")
    eos = config.get("eos_token_id", read_json(Path(model) / "config.json").get("eos_token_id"))
    eos_ids = {id for id in (eos if isinstance(eos, list) else [eos]) if isinstance(id, int)}
    if tokenizer_eos_id is not None:
        eos_ids.add(tokenizer_eos_id)

    def number(name: str, default: float) -> float:
        value = config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"generation_config.json: {name} must be a number, not {value!r}")
        return float(value)

    limit = int(number("max_new_tokens", 0))
    return GenerationDefaults(
        eos_ids=tuple(sorted(eos_ids)),
        temperature=number("temperature", 1.0),
        top_p=number("top_p", 1.0),
        top_k=max(0, int(number("top_k", 0))),
        min_p=number("min_p", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0),
        max_new_tokens=limit if limit > 0 else None,
    )


def sampling_params(
    request: CompletionRequest | ChatRequest, num_prompt: int, limits: Limits, defaults: GenerationDefaults
) -> SamplingParams:
    """What to ask a worker for, with seed 0: `with_seed` makes one per choice."""
    max_tokens = _max_tokens(request, num_prompt, limits, defaults)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(f"min_tokens must be at most max_tokens={max_tokens}, got {min_tokens}.", "min_tokens")
    logprobs = num_logprobs(request)
    if logprobs is not None and logprobs > limits.max_logprobs:
        raise RequestError(
            f"Requested {logprobs} logprobs; this server gives at most {limits.max_logprobs}.", "logprobs"
        )
    num_scores = num_prompt_logprobs(request)
    if num_scores is not None and num_scores > limits.max_logprobs:
        raise RequestError(
            f"Requested {num_scores} prompt logprobs; this server gives at most {limits.max_logprobs}.",
            "prompt_logprobs",
        )
    temperature = _or(request.temperature, defaults.temperature)
    picks = num_generated(request) > (request.n or 1)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=_or(request.top_p, defaults.top_p),
        top_k=max(0, _or(request.top_k, defaults.top_k)),
        min_p=_or(request.min_p, defaults.min_p),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(request, limits),
        stop_ids=_stop_ids(request, limits, defaults),
        logprobs=0 if picks and logprobs is None else logprobs,
        prompt_logprobs=0 if max_tokens == 0 and num_scores is None else num_scores,
    )


def check_combinations(request: CompletionRequest | ChatRequest) -> None:
    """Fields that only make sense together, or not together, and those that may only be false."""
    for name in ONLY_FALSE:
        if getattr(request, name):
            raise not_supported(name, UNSUPPORTED[name])
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise not_supported("include_obfuscation", UNSUPPORTED["include_obfuscation"], "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("'prompt_logprobs' cannot be streamed; use 'echo' with 'logprobs'.", "prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise RequestError("'stream_options' can only be given together with 'stream': true.", "stream_options")
    if isinstance(request, CompletionRequest):
        _check_best_of(request)
        if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
            raise RequestError(
                "'max_tokens' must be at least 1 unless 'echo' is true, or there are 'prompt_logprobs'.", "max_tokens"
            )
        return
    if request.functions and request.function_call != "none":
        raise not_supported("functions", '"function_call": "none" with it; they are called tools since 2023')
    if request.top_logprobs and not request.logprobs:
        raise RequestError("'top_logprobs' can only be given together with 'logprobs': true.", "top_logprobs")
    if None not in (request.max_tokens, request.max_completion_tokens) and (
        request.max_tokens != request.max_completion_tokens
    ):
        raise RequestError(
            "'max_tokens' and 'max_completion_tokens' are two names for one limit; give one of them.",
            "max_tokens",
        )


def _check_best_of(request: CompletionRequest) -> None:
    num_choices = request.n or 1
    if request.best_of is None or request.best_of == num_choices:
        return
    if request.best_of < num_choices:
        raise RequestError(f"'best_of' must be at least 'n'={num_choices}, got {request.best_of}.", "best_of")
    if request.stream:
        raise RequestError("'best_of' cannot be streamed: which are best is only known at the end.", "best_of")


def num_generated(request: CompletionRequest | ChatRequest) -> int:
    """How many choices are made of each prompt: more than the answer has, if it has the best of them."""
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    return best_of or request.n or 1


def num_prompt_logprobs(request: CompletionRequest | ChatRequest) -> int | None:
    """How many alternatives of each token of a prompt are needed: to be echoed, or for `prompt_logprobs`."""
    is_echo = isinstance(request, CompletionRequest) and bool(request.echo)
    wanted = [request.prompt_logprobs, num_logprobs(request) if is_echo else None]
    return max((num for num in wanted if num is not None), default=None)


def check_prompt_size(request: CompletionRequest | ChatRequest, num_ids: int, num_characters: int) -> None:
    """Raise if the answer would have to repeat too much of one of its prompts, which has so many ids and characters.

    Scores come from the worker in one message, and what is repeated waits in memory until the client has read it.
    """
    is_echo = isinstance(request, CompletionRequest) and bool(request.echo)
    num_each = num_prompt_logprobs(request)
    num_scores = num_ids * (1 + num_each) if num_each is not None else 0
    if num_scores > MAX_PROMPT_SCORES:
        is_named = request.prompt_logprobs is not None
        what, field = ("'prompt_logprobs'",) * 2 if is_named else ("'echo' with 'logprobs'", "'logprobs'")
        raise RequestError(
            f"{what} would give {num_scores} log probabilities for one prompt; this server gives at "
            f"most {MAX_PROMPT_SCORES}. Please ask for fewer {field}.",
            field.strip("'"),
        )
    score_bytes = _SCORE_BYTES if request.prompt_logprobs is None else _ENTRY_BYTES
    num_bytes = score_bytes * num_scores + _ID_BYTES * num_ids * bool(request.return_token_ids)
    num_bytes = (num_bytes + num_characters * is_echo) * num_generated(request)
    if num_bytes > MAX_REPEATED_BYTES:
        raise RequestError(
            f"The answer would repeat the prompt in about {num_bytes >> 20} MiB; this server repeats at most "
            f"{MAX_REPEATED_BYTES >> 20} MiB. Please ask for fewer choices ('n') at a time.",
            "n",
        )


def check_token_ids(ids: Sequence[int], limits: Limits, field: str) -> None:
    """Every id must be a row of the model's vocabulary."""
    if ids and max(ids) >= limits.vocab_size:
        raise RequestError(f"Token id {max(ids)} is out of vocabulary (0 to {limits.vocab_size - 1}).", field)


class SeedSource:
    """Seeds for requests that bring none. With a server seed the k-th such request always gets the same one."""

    def __init__(self, server_seed: int | None) -> None:
        self._take_number: Callable[[], int] = itertools.count().__next__
        self._num_made = 0
        self._random: random.Random = random.SystemRandom() if server_seed is None else random.Random(server_seed)

    def go_on(self, take_number: Callable[[], int]) -> None:
        """`take_number` says how many were given before, by earlier gateways and by others."""
        self._take_number = take_number

    def for_request(self, request: GenerationRequest) -> int:
        if request.seed is not None:
            return request.seed & ((1 << _SEED_BITS) - 1)
        number = self._take_number()
        while self._num_made < number:  # those of other gateways
            self._random.getrandbits(_SEED_BITS)
            self._num_made += 1
        self._num_made += 1
        return self._random.getrandbits(_SEED_BITS)


def hash_salt(salt: str | None) -> bytes:
    """What workers know of a salt: they do not keep what may be a secret."""
    return b"" if salt is None else hashlib.blake2b(salt.encode(), digest_size=16).digest()


def choice_seed(seed: int, choice: int) -> int:
    """Choice 0 uses the request's seed itself; choice i > 0 uses a seed derived from it and i."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def _max_tokens(
    request: CompletionRequest | ChatRequest, num_prompt: int, limits: Limits, defaults: GenerationDefaults
) -> int:
    """The request's limit if it fits, or the default cut to what fits."""
    room = limits.max_total_tokens - num_prompt
    asked = asked_tokens(request)
    if room < (0 if asked == 0 else 1):
        raise too_long(
            num_prompt, limits.max_total_tokens, "messages" if isinstance(request, ChatRequest) else "prompt"
        )
    if asked is None:
        default = DEFAULT_COMPLETION_TOKENS if isinstance(request, CompletionRequest) else room
        return min(room, default, defaults.max_new_tokens or room)
    if asked > room:
        raise RequestError(
            f"'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum context length is "
            f"{limits.max_total_tokens} tokens and your request has {num_prompt} input tokens "
            f"({asked} > {limits.max_total_tokens} - {num_prompt}).",
            "max_tokens",
        )
    return asked


def asked_tokens(request: CompletionRequest | ChatRequest) -> int | None:
    """The request's limit, which has two names in chats."""
    if isinstance(request, ChatRequest) and request.max_tokens is None:
        return request.max_completion_tokens
    return request.max_tokens


def num_logprobs(request: CompletionRequest | ChatRequest) -> int | None:
    """How many alternatives of each token the client wants to see, if it wants log probabilities at all."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None


def _logit_bias(request: GenerationRequest, limits: Limits) -> dict[int, float]:
    bias = request.logit_bias or {}
    check_token_ids(list(bias), limits, "logit_bias")
    return bias


def _stop_ids(request: GenerationRequest, limits: Limits, defaults: GenerationDefaults) -> tuple[int, ...]:
    asked = request.stop_token_ids or []
    check_token_ids(asked, limits, "stop_token_ids")
    ids = tuple(dict.fromkeys([*asked, *(() if request.ignore_eos else defaults.eos_ids)]))
    if len(ids) > MAX_STOP_IDS:
        raise RequestError(f"At most {MAX_STOP_IDS} stop token ids are supported, got {len(ids)}.", "stop_token_ids")
    return ids


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
