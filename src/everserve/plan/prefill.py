"""Balanced prefill: which prompt tokens of which homes are computed together (FailSafe's Algorithm 1).

A token costs as many units as it has keys to attend to, itself included, and a constant for everything else. Portions
of prompts go into the batch one by one, always the next one of the home with the least cost so far, until the budget of
tokens is used up. What there is after each portion is a batch too, and the one with the best tokens per cost of its
most loaded home is chosen: a home that is left alone with a long context makes all others wait for it.

What the paper leaves open is decided here:

    cost of a chunk     the sum over its tokens of position + 1 + constant. The constant is the model's: what a token
                        costs apart from attention, over what a key costs (`TokenCost.of_model`)
    W_r                 the pending work of a home decides between homes with the same cost in the batch
    best batch          tokens / (cost of the most loaded home + cost of a step). Without the last, which stands for
                        what a step costs whatever is in it, small batches are always best: contexts only grow
    starvation          expensive tokens make every batch worse. So a batch with something of every home is better than
                        one without, and within a home prompts are in the order in which they came
    portions            of `portion` tokens, so that there are not thousands of rounds. The most loaded home has at most
                        one portion more than in the best division of as many tokens
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from everserve.plan.steps import StepWork
from everserve.plan.weights import ModelSizes
from everserve.tables.ids import Rank
from everserve.tables.prompts import PendingPrompt


@dataclass(frozen=True)
class TokenCost:
    """Whole numbers: sums of them are exact in any order."""

    constant: int

    @classmethod
    def of_model(cls, model: ModelSizes) -> "TokenCost":
        work = StepWork.of(model, num_sharing=1)
        return cls(max(1, round(work.per_token / work.per_key)))

    def of(self, first: int, num_tokens: int) -> int:
        """The cost of so many tokens from position `first` on."""
        return num_tokens * (self.constant + first) + num_tokens * (num_tokens + 1) // 2

    def of_all(self, prompts: Sequence[PendingPrompt]) -> int:
        return sum(self.of(*prompt) for prompt in prompts)


KEYS_ONLY = TokenCost(1)  # while no model is known


class Batch(NamedTuple):
    """The parts of a batch by home, without those that have nothing in it."""

    tokens: dict[Rank, int]
    costs: dict[Rank, int]

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens.values())

    @property
    def most(self) -> int:
        """The cost of the most loaded home."""
        return max(self.costs.values(), default=0)


class _Portion(NamedTuple):
    home: Rank
    num_tokens: int
    cost: int


def balanced_batch(
    homes: Mapping[Rank, Sequence[PendingPrompt]],
    budget: int,
    cost: TokenCost,
    *,
    portion: int = 1,
    step_cost: int = 0,
) -> Batch:
    """A balanced batch of at most `budget` tokens. The same for the same input, whatever the order of `homes`."""
    portions = _fill(homes, budget, cost, portion)
    return _batch(portions[: _best(portions, step_cost)])


def first_come_batch(prompts: Iterable[tuple[Rank, PendingPrompt]], budget: int, cost: TokenCost) -> Batch:
    """What systems do that count tokens only, for comparison: prompts in this order, wherever their homes are."""
    portions = []
    for home, (first, num_tokens) in prompts:
        num = min(num_tokens, budget)
        budget -= num
        if num:
            portions.append(_Portion(home, num, cost.of(first, num)))
    return _batch(portions)


def _fill(homes: Mapping[Rank, Sequence[PendingPrompt]], budget: int, cost: TokenCost, portion: int) -> list[_Portion]:
    """The whole batch, in the order in which it is filled."""
    waiting = {home: [p for p in prompts if p.num_tokens > 0] for home, prompts in homes.items()}
    at = {home: PendingPrompt(0, 0) for home in homes}  # the rest of the prompt in hand
    queue = [(0, -cost.of_all(prompts), home) for home, prompts in waiting.items() if prompts]
    heapq.heapify(queue)
    portion = max(1, min(portion, budget // max(len(queue), 1)))  # everyone gets some
    portions: list[_Portion] = []
    while budget > 0 and queue:
        load, pending, home = heapq.heappop(queue)
        first, left = at[home] if at[home].num_tokens else waiting[home].pop(0)
        num = min(left, portion, budget)
        portions.append(_Portion(home, num, cost.of(first, num)))
        budget -= num
        at[home] = PendingPrompt(first + num, left - num)
        if left > num or waiting[home]:
            heapq.heappush(queue, (load + portions[-1].cost, pending, home))
    return portions


def _best(portions: Sequence[_Portion], step_cost: int) -> int:
    """How many of the portions are the best batch. Of equals the largest."""
    loads: dict[Rank, int] = {}
    best, most, best_num = 0.0, 0, len(portions)
    num_homes = len({portion.home for portion in portions})
    num_tokens = 0
    for num, portion in enumerate(portions, start=1):
        num_tokens += portion.num_tokens
        loads[portion.home] = loads.get(portion.home, 0) + portion.cost
        most = max(most, loads[portion.home])
        if len(loads) == num_homes and num_tokens / (most + step_cost) >= best:
            best, best_num = num_tokens / (most + step_cost), num
    return best_num


def _batch(portions: Sequence[_Portion]) -> Batch:
    tokens: dict[Rank, int] = {}
    costs: dict[Rank, int] = {}
    for home, num_tokens, cost in portions:
        tokens[home] = tokens.get(home, 0) + num_tokens
        costs[home] = costs.get(home, 0) + cost
    return Batch(tokens, costs)
