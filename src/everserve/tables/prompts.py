"""Prompts that a home has still to compute, as it publishes them."""

from typing import NamedTuple


class PendingPrompt(NamedTuple):
    """The prompt of one stream: tokens that are computed already, and those that are not."""

    first: int
    num_tokens: int
