"""Tokens that a stream must not have next: what a grammar leaves out, and what would complete a bad word."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from everserve.guides.guide import Mask, is_allowed
from everserve.tables.requests import Tokens


class BadWords:
    """The bad words of one stream, as tokens in a row. What is forbidden next follows from the output alone."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._singles = tuple(word[0] for word in words if len(word) == 1)
        self._longer = [word for word in words if len(word) > 1]

    def last_tokens(self, tokens: Tokens, num_prompt: int) -> tuple[int, ...]:
        """The last tokens of the words that the output would end with."""
        num_output = len(tokens) - num_prompt
        completing = (
            word[-1]
            for word in self._longer
            if num_output >= len(word) - 1 and tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]
        )
        return (*self._singles, *completing)


def apply(logits_LV: Tensor, masks: Mapping[int, Mask]) -> None:
    """Forbids in these rows, in place, what is not allowed."""
    if not masks:
        return
    vocab_size, device = logits_LV.shape[1], logits_LV.device
    if device.type == "cpu":  # NumPy: a call of torch takes longer than the work, between two tokens of every stream
        numbers_LV = logits_LV.numpy()
        for row, mask in masks.items():
            np.copyto(numbers_LV[row], -np.inf, where=~is_allowed(mask, vocab_size))
        return
    # A bit of each token goes to the device, not a byte.
    words_RW = torch.from_numpy(np.stack([mask.view(np.int32) for mask in masks.values()])).to(device)
    bits_RV = (words_RW.unsqueeze(-1) >> torch.arange(32, device=device) & 1).flatten(1)[:, :vocab_size]
    rows = torch.tensor(list(masks), device=device)
    logits_LV[rows] = logits_LV[rows].masked_fill(bits_RV == 0, -torch.inf)


def empty_rows(logits_LV: Tensor, tokens: Mapping[int, int]) -> list[int]:
    """Those of these rows in which nothing is allowed. A token that is chosen where something is allowed is allowed:
    only where it is not, all have to be looked at."""
    if logits_LV.device.type == "cpu":
        numbers_LV = logits_LV.numpy()
        tokens = {row: token for row, token in tokens.items() if token < 0 or numbers_LV[row, token] == -np.inf}
    if not tokens:
        return []
    rows = list(tokens)
    is_empty = (logits_LV[rows] == -torch.inf).all(dim=-1).tolist()
    return [row for row, empty in zip(rows, is_empty, strict=True) if empty]
