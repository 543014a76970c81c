"""How much of a step's prompt tokens a home takes, while other homes use the same workers.

Homes step independently. Each one plans the batch of all homes (plan/prefill.py) from its own prompts and from what it
was last told of the others', and takes its own part of it. With the same tables all of them find the same batch; with
older ones the parts together are a little more or less than the budget, which costs balance and nothing else.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from everserve.engine.sequence import Sequence as Stream
from everserve.plan.prefill import TokenCost, balanced_batch
from everserve.tables.ids import Rank
from everserve.tables.prompts import PendingPrompt

_MAX_PUBLISHED = 16  # prompts


class PrefillShare:
    """The share of one home in the prompts of a step. `budget`: prompt tokens of all homes that are computed at a time;
    `portion`: the smallest part.
    """

    def __init__(self, cost: TokenCost, budget: int, portion: int) -> None:
        self.cost = cost
        self._budget = budget
        self._portion = portion
        self._home = Rank(0)
        self._others: Mapping[Rank, Sequence[PendingPrompt]] = {}

    def use(self, home: Rank, others: Mapping[Rank, Sequence[PendingPrompt]]) -> None:
        """What other homes have still to compute, as far as is known. None of them: everything is ours."""
        self._home = home
        self._others = {rank: prompts for rank, prompts in others.items() if rank != home and prompts}

    def limit(self, own: Iterable[Stream], left: int) -> int:
        """How many of the `left` tokens that the step has room for these prompts may have: at least one portion."""
        if not self._others or left <= self._portion:
            return left
        homes = {**self._others, self._home: self.first_of(pending(own))}
        # A step has a cost of its own, whatever is in it: with this one only long contexts cut a batch short.
        step_cost = self._budget * self.cost.constant
        batch = balanced_batch(homes, self._budget, self.cost, portion=self._portion, step_cost=step_cost)
        return min(left, max(self._portion, batch.tokens.get(self._home, 0)))

    def first_of(self, prompts: Iterable[PendingPrompt]) -> tuple[PendingPrompt, ...]:
        """The first prompts, as many as a batch can hold."""
        found: list[PendingPrompt] = []
        num_left = self._budget
        for prompt in prompts:
            if num_left <= 0 or len(found) == _MAX_PUBLISHED:
                break
            found.append(prompt)
            num_left -= prompt.num_tokens
        return tuple(found)


def pending(streams: Iterable[Stream]) -> Iterator[PendingPrompt]:
    """What these have still to compute, apart from the next token of those that decode. KV that is saved is copied."""
    for stream in streams:
        first = stream.num_computed if stream.saved is None else max(stream.num_computed, stream.saved.num_tokens)
        num_tokens = len(stream.tokens) - first
        if num_tokens > 1 or not stream.num_computed:
            yield PendingPrompt(first, max(num_tokens, 1))
