"""Presence, frequency and repetition penalties: tokens that a stream already contains become less likely.

For all streams of a step in one go: on a device each call costs more than what it computes.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everserve.tables.requests import RequestSpec, SamplingParams, Tokens

_FIRST_CAPACITY = 64


class Penalties:
    """Which tokens of one stream have penalties, and how often each of them was produced."""

    def __init__(self, params: SamplingParams, prompt: Tokens, known: Tokens) -> None:
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._repetition = params.repetition_penalty
        counts = Counter(dict.fromkeys(prompt, 0) if self._repetition != 1.0 else {})  # others are over output alone
        counts.update(known)
        num = len(counts)
        self._place = dict(zip(counts, range(num), strict=True))
        capacity = max(_FIRST_CAPACITY, 2 * num)
        self._ids, self._counts = np.zeros(capacity, np.int64), np.zeros(capacity, np.float32)
        self._ids[:num], self._counts[:num] = list(counts), list(counts.values())

    @classmethod
    def of(cls, spec: RequestSpec) -> "Penalties | None":
        """None when the stream has no penalties."""
        params = spec.params
        wanted = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        return cls(params, spec.prompt, spec.known) if wanted else None

    def count(self, token: int) -> None:
        """One more token was produced."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1

    def changes(self) -> "Changes":
        """The changes of one row of logits."""
        num = len(self._place)
        counts = self._counts[:num]
        amounts = self._frequency * counts + self._presence * (counts > 0).astype(np.float32)
        return Changes(self._ids[:num], np.full(num, self._repetition, np.float32), amounts)


class Changes(NamedTuple):
    """Logits of these tokens: positive ones divided by the factor, others multiplied, then less the amount."""

    ids: NDArray[np.int64]
    factors: NDArray[np.float32]
    amounts: NDArray[np.float32]


def apply(logits_LV: Tensor, penalties: dict[int, Penalties]) -> None:
    """Change these rows in place."""
    changes = {row: each.changes() for row, each in penalties.items()}
    vocab_size = logits_LV.shape[1]
    places = np.concatenate([change.ids + row * vocab_size for row, change in changes.items()])
    if not len(places):
        return
    at, factors, amounts = (
        torch.from_numpy(array).to(logits_LV.device)
        for array in (
            places,
            np.concatenate([change.factors for change in changes.values()]),
            np.concatenate([change.amounts for change in changes.values()]),
        )
    )
    flat = logits_LV.view(-1)
    values = flat[at]
    flat[at] = torch.where(values > 0, values / factors, values * factors) - amounts
