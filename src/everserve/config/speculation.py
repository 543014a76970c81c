"""Drafts: tokens that may come next, computed beside the ones that do."""

from typing import Any, Literal

import msgspec

from everserve.config.base import Config
from everserve.errors import ConfigError

_SHORTEST, _LONGEST = 2, 4


class Speculation(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where drafts come from, and how many a stream has at most. Names are vLLM's."""

    num_speculative_tokens: int  # 0: none
    method: Literal["ngram"] = "ngram"
    prompt_lookup_max: int = _LONGEST
    prompt_lookup_min: int = _SHORTEST

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode() if self.num_speculative_tokens else "none"

    def check(self) -> None:
        if not 0 <= self.num_speculative_tokens <= 64:
            raise ConfigError("--speculative-config: num_speculative_tokens is between 0 (no drafts) and 64")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError("--speculative-config: 1 <= prompt_lookup_min <= prompt_lookup_max")


NO_DRAFTS = Speculation(num_speculative_tokens=0)


def read_speculation(said: Any) -> Speculation:
    """From JSON, or what a file of flags says. One length of n-grams that is not said is the other one."""
    try:
        given = msgspec.json.decode(said) if isinstance(said, str) else said
        if isinstance(given, dict) and given.keys() & {"prompt_lookup_max", "prompt_lookup_min"}:
            low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
            given = {**given, "prompt_lookup_min": low or high, "prompt_lookup_max": high or low}
        found = msgspec.convert(given, Speculation)
    except msgspec.MsgspecError as error:
        example = '{"method": "ngram", "num_speculative_tokens": 8}'
        raise ConfigError(f"--speculative-config {said}: {error}; expected is JSON such as '{example}'") from None
    found.check()
    return found
