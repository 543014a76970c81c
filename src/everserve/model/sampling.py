"""Logits to tokens.

The only randomness is `uniform(seed, index)`: one number in [0, 1) per (request seed, token index). So a stream's
tokens do not depend on what else is in the batch, on which worker it runs, or on whether it was moved in between.

Here is what is the same on every device: adjusting logits, drawing numbers, reporting probabilities. The choice itself
is `Ops.choose`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from everserve.guides.guide import Mask
from everserve.model import forbidden, penalties
from everserve.model.choosing import Draw, order_keys
from everserve.model.ops import Ops
from everserve.model.penalties import Penalties
from everserve.tables.outputs import TokenLogprobs
from everserve.tables.requests import SamplingParams

GREEDY = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.0)
NOT_A_NUMBER = -1  # what `Ops.choose` says of a row without a most likely token
NONE_ALLOWED = -2  # what `sample` says of a row in which no token is allowed
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingRow:
    """What sampling needs to know of one stream: its parameters and which output token comes now."""

    params: SamplingParams
    index: int
    penalties: Penalties | None
    mask: Mask | None = None  # which tokens a grammar allows
    forbidden: tuple[int, ...] = ()  # last tokens of bad words, if this one would complete them

    @property
    def is_too_short(self) -> bool:
        """It must not stop yet."""
        return self.index < self.params.min_tokens and bool(self.params.stop_ids)

    @property
    def is_restricted(self) -> bool:
        """Perhaps to no token at all."""
        return self.mask is not None or bool(self.params.bad_words)


class Choice(NamedTuple):
    """The token chosen for one row."""

    token: int  # or NOT_A_NUMBER (broken weights or an overflow), or NONE_ALLOWED
    logprobs: TokenLogprobs | None


def needs_logits(params: SamplingParams) -> bool:
    """Whether logits are looked at, or changed, besides choosing a token from them."""
    is_adjusted = bool(params.logit_bias) or (params.min_tokens > 0 and bool(params.stop_ids))
    has_penalties = bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1.0
    wants_scores = params.logprobs is not None or params.prompt_logprobs is not None
    is_restricted = params.guided is not None or bool(params.bad_words)
    return wants_scores or is_adjusted or has_penalties or is_restricted or params.pooled


def is_plain(params: SamplingParams) -> bool:
    """Whether the most likely token is all that is ever wanted of outputs: logits need not be looked at in any other
    way."""
    is_like_it = msgspec.structs.replace(params, prompt_logprobs=None)
    return params.temperature == 0 and not needs_logits(is_like_it)


def sample(ops: Ops, logits_LV: Tensor, rows: list[SamplingRow]) -> list[Choice]:
    """One token per row."""
    adjusted_LV = _adjust(logits_LV, rows)
    tokens = ops.choose(adjusted_LV, [draw(row.params, row.index) for row in rows])
    for i in forbidden.empty_rows(adjusted_LV, {i: tokens[i] for i, row in enumerate(rows) if row.is_restricted}):
        tokens[i] = NONE_ALLOWED
    logprobs = _chosen_logprobs(logits_LV, rows, tokens)
    return [Choice(token, logprobs.get(i)) for i, token in enumerate(tokens)]


def token_logprobs(logits_LV: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    """Log probabilities, under the model alone, of one given token per row and of the `num_top` best ones."""
    logprobs_LV = torch.log_softmax(logits_LV.float(), dim=-1)
    chosen_L1 = torch.tensor(tokens, device=logits_LV.device).unsqueeze(-1)
    values_L1 = logprobs_LV.gather(-1, chosen_L1)
    ranks = ((logprobs_LV > values_L1).sum(dim=-1) + 1).tolist()
    top_ids = order_keys(logprobs_LV).topk(num_top, dim=-1).indices if num_top else chosen_L1[:, :0]
    top_values = logprobs_LV.gather(-1, top_ids)
    return [
        TokenLogprobs(logprob=value, rank=rank, top_ids=tuple(ids), top_logprobs=tuple(values))
        for value, rank, ids, values in zip(
            values_L1.squeeze(-1).tolist(), ranks, top_ids.tolist(), top_values.tolist(), strict=True
        )
    ]


def uniform(seed: int, index: int) -> float:
    """The one random number of token `index` of a stream: 53 bits of a hash of both (two splitmix64 rounds)."""
    bits = _mix((seed & _MASK64) ^ _mix(index + 0x9E3779B97F4A7C15))
    return (_mix(bits + 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x &= _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _adjust(logits_LV: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Logits after penalties, biases and what is forbidden: by min_tokens, bad words and grammars. A copy only if
    something changes."""
    penalised = {i: row.penalties for i, row in enumerate(rows) if row.penalties is not None}
    others = [i for i, row in enumerate(rows) if row.params.logit_bias or row.is_too_short or row.forbidden]
    masked = {i: row.mask for i, row in enumerate(rows) if row.mask is not None}
    if not penalised and not others and not masked:
        return logits_LV
    result = logits_LV.clone()
    if penalised:
        penalties.apply(result, penalised)
    for i in others:
        params = rows[i].params
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=result.device)
            result[i, ids] += torch.tensor(list(params.logit_bias.values()), device=result.device)
        banned = rows[i].forbidden + (params.stop_ids if rows[i].is_too_short else ())
        if banned:
            result[i, list(banned)] = -torch.inf
    forbidden.apply(result, masked)
    return result


def draw(params: SamplingParams, index: int) -> Draw:
    """How output token `index` is chosen."""
    if params.temperature == 0:
        return GREEDY
    return Draw(params.temperature, params.top_k, params.top_p, params.min_p, uniform(params.seed, index))


def _chosen_logprobs(logits_LV: Tensor, rows: list[SamplingRow], tokens: list[int]) -> dict[int, TokenLogprobs]:
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None and tokens[i] >= 0]
    if not wanted:
        return {}
    num_top = max(rows[i].params.logprobs or 0 for i in wanted)
    found = token_logprobs(logits_LV[wanted], [tokens[i] for i in wanted], num_top)
    return {i: entry.best(rows[i].params.logprobs or 0) for i, entry in zip(wanted, found, strict=True)}
