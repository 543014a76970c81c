"""Logits to tokens.

The only randomness is `uniform(seed, index)`: one number in [0, 1) per (request seed, token index). So a stream's
tokens do not depend on what else is in the batch, on which worker it runs, or on whether it was moved in between.

Every choice among tokens goes by (logit, then lower id first) as one integer key without ties, so that the result does
not depend on the algorithm that sorts either.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from everserve.tables.outputs import TokenLogprobs
from everserve.tables.requests import RequestSpec, SamplingParams

_NUM_CANDIDATES = 256  # nearly all filtered choices fall among this many best tokens; the rest are sorted in full
_MASK64 = (1 << 64) - 1


class Penalties:
    """What the penalties of one stream need: which tokens its prompt has, and how often each was produced."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = sorted(set(prompt))
        self.produced: dict[int, int] = {}

    @classmethod
    def of(cls, spec: RequestSpec) -> "Penalties | None":
        """None when the stream has no penalties."""
        params = spec.params
        wanted = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        return cls(spec.prompt) if wanted else None

    def count(self, token: int) -> None:
        """One more token was produced."""
        self.produced[token] = self.produced.get(token, 0) + 1

    def apply(self, logits_V: Tensor, params: SamplingParams) -> None:
        """Change one row of logits in place: repetition over prompt and output, the others over output alone."""
        device = logits_V.device
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*self.prompt, *self.produced}), device=device)
            values, factor = logits_V[seen], params.repetition_penalty
            logits_V[seen] = torch.where(values > 0, values / factor, values * factor)
        if self.produced and (params.presence_penalty or params.frequency_penalty):
            ids = torch.tensor(list(self.produced), device=device)
            counts = torch.tensor(list(self.produced.values()), dtype=torch.float32, device=device)
            logits_V[ids] -= params.frequency_penalty * counts + params.presence_penalty


@dataclass(frozen=True)
class SamplingRow:
    """What sampling needs to know of one stream: its parameters and which output token comes now."""

    params: SamplingParams
    index: int
    penalties: Penalties | None


@dataclass(frozen=True)
class Choice:
    """The token chosen for one row."""

    token: int
    logprobs: TokenLogprobs | None


def sample(logits_LV: Tensor, rows: list[SamplingRow]) -> list[Choice | None]:
    """One token per row; None for a row whose logits are not numbers (broken weights or an overflow)."""
    broken = logits_LV.amax(dim=-1).isnan().tolist()
    adjusted_LV = _adjust(logits_LV, rows)
    tokens = adjusted_LV.argmax(dim=-1).tolist()
    plain = [i for i, row in enumerate(rows) if row.params.temperature > 0 and not _is_filtered(row.params)]
    filtered = [i for i, row in enumerate(rows) if row.params.temperature > 0 and _is_filtered(row.params)]
    for chosen, choose in ((plain, _choose_plain), (filtered, _choose_filtered)):
        if chosen:
            picked = choose(adjusted_LV[chosen], [rows[i] for i in chosen])
            for i, token in zip(chosen, picked, strict=True):
                tokens[i] = token
    logprobs = _chosen_logprobs(logits_LV, rows, tokens)
    return [
        None if is_broken else Choice(token, logprobs.get(i))
        for i, (token, is_broken) in enumerate(zip(tokens, broken, strict=True))
    ]


def token_logprobs(logits_LV: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    """Log probabilities, under the model alone, of one given token per row and of the `num_top` best ones."""
    logprobs_LV = torch.log_softmax(logits_LV.float(), dim=-1)
    chosen_L1 = torch.tensor(tokens, device=logits_LV.device).unsqueeze(-1)
    values_L1 = logprobs_LV.gather(-1, chosen_L1)
    ranks = ((logprobs_LV > values_L1).sum(dim=-1) + 1).tolist()
    top_ids = _order_keys(logprobs_LV).topk(num_top, dim=-1).indices if num_top else chosen_L1[:, :0]
    top_values = logprobs_LV.gather(-1, top_ids)
    return [
        TokenLogprobs(logprob=value, rank=rank, top_ids=ids, top_logprobs=values)
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
    """Logits after penalties, biases and the stop ids forbidden by min_tokens; a copy only if something changes."""
    result = logits_LV
    for i, row in enumerate(rows):
        params = row.params
        too_short = row.index < params.min_tokens and bool(params.stop_ids)
        if row.penalties is None and not params.logit_bias and not too_short:
            continue
        if result is logits_LV:
            result = logits_LV.clone()
        if row.penalties is not None:
            row.penalties.apply(result[i], params)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=result.device)
            result[i, ids] += torch.tensor(list(params.logit_bias.values()), device=result.device)
        if too_short:
            result[i, list(params.stop_ids)] = -torch.inf
    return result


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def _column(values: list[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(-1)


def _uniforms(rows: list[SamplingRow], like: Tensor) -> Tensor:
    return _column([uniform(row.params.seed, row.index) for row in rows], like, torch.float64)


def _choose_plain(logits_LV: Tensor, rows: list[SamplingRow]) -> list[int]:
    """Inverse transform over the whole vocabulary, in id order."""
    scaled_LV = logits_LV / _column([row.params.temperature for row in rows], logits_LV)
    cumulative_LV = torch.softmax(scaled_LV, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    return _invert(cumulative_LV, rows).squeeze(-1).tolist()


def _choose_filtered(logits_LV: Tensor, rows: list[SamplingRow]) -> list[int]:
    """Inverse transform over the tokens that top-k, top-p and min-p leave, best first."""
    vocab = logits_LV.shape[-1]
    scaled_LV = logits_LV / _column([row.params.temperature for row in rows], logits_LV)
    probs_LV = torch.softmax(scaled_LV, dim=-1)
    keys_LV = _order_keys(scaled_LV)
    largest_k = max(row.params.top_k for row in rows)
    num = min(vocab, max(_NUM_CANDIDATES, largest_k))
    ids_LC, kept_LC = _candidates(keys_LV, probs_LV, rows, num)
    if num < vocab and bool(kept_LC[:, -1].any()):  # the cut may lie beyond the candidates: sort everything
        ids_LC, kept_LC = _candidates(keys_LV, probs_LV, rows, vocab)
    mass_LC = torch.where(kept_LC, probs_LV.gather(-1, ids_LC), 0.0).to(torch.float64)
    return ids_LC.gather(-1, _invert(mass_LC.cumsum(dim=-1), rows)).squeeze(-1).tolist()


def _candidates(keys_LV: Tensor, probs_LV: Tensor, rows: list[SamplingRow], num: int) -> tuple[Tensor, Tensor]:
    """The `num` best token ids of each row, and which of them the filters keep (always a prefix of them)."""
    ids_LC = keys_LV.topk(num, dim=-1).indices
    probs_LC = probs_LV.gather(-1, ids_LC)
    vocab = keys_LV.shape[-1]
    position_C = torch.arange(num, device=keys_LV.device)
    kept_LC = position_C < _column([row.params.top_k or vocab for row in rows], keys_LV, torch.int64)
    before_LC = probs_LC.cumsum(dim=-1, dtype=torch.float64) - probs_LC
    top_p = _column([row.params.top_p if row.params.top_p < 1.0 else 2.0 for row in rows], keys_LV, torch.float64)
    kept_LC &= before_LC < top_p
    kept_LC &= probs_LC >= _column([row.params.min_p for row in rows], keys_LV) * probs_LC[:, :1]
    kept_LC[:, 0] = True
    return ids_LC, kept_LC


def _invert(cumulative_LC: Tensor, rows: list[SamplingRow]) -> Tensor:
    """The first position where the cumulative mass exceeds u times the total."""
    target_L1 = _uniforms(rows, cumulative_LC) * cumulative_LC[:, -1:]
    return torch.searchsorted(cumulative_LC, target_L1, right=True).clamp_(max=cumulative_LC.shape[-1] - 1)


def _order_keys(values_LV: Tensor) -> Tensor:
    """int64 keys that order like (value, then lower id first) and never tie."""
    bits = values_LV.float().contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # two's complement order = float order
    vocab = values_LV.shape[-1]
    lower_id_first = torch.arange(vocab - 1, -1, -1, device=values_LV.device)
    return (ordered.to(torch.int64) << 32) | lower_id_first


def _chosen_logprobs(logits_LV: Tensor, rows: list[SamplingRow], tokens: list[int]) -> dict[int, TokenLogprobs]:
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return {}
    num_top = max(rows[i].params.logprobs or 0 for i in wanted)
    found = token_logprobs(logits_LV[wanted], [tokens[i] for i in wanted], num_top)
    return {i: _best(entry, rows[i].params.logprobs or 0) for i, entry in zip(wanted, found, strict=True)}


def _best(entry: TokenLogprobs, num_top: int) -> TokenLogprobs:
    """The entry with only its first `num_top` alternatives."""
    return TokenLogprobs(
        logprob=entry.logprob,
        rank=entry.rank,
        top_ids=entry.top_ids[:num_top],
        top_logprobs=entry.top_logprobs[:num_top],
    )
