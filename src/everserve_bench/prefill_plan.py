"""Prompts of a trace over homes in lock-step, as in FailSafe: how uneven batches are, and how long prompts wait.

Nothing is computed: requests arrive, are given to homes, and one batch after the other takes as long as its most loaded
home. *In turn*: the next home, and prompt tokens as they come. *Balanced*: the home with the least pending cost, and
batches by plan/prefill.py.

This is the paper's setting, in which the most loaded home holds all others. Here homes step independently, so what is
gained is less: everserve_bench/prefill.py measures it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle

from everserve.plan.prefill import Batch, TokenCost, balanced_batch, first_come_batch
from everserve.tables.ids import Rank
from everserve.tables.prompts import PendingPrompt
from everserve_bench.traces import Lengths

_PORTION = 16


@dataclass(frozen=True)
class Outcome:
    """`max_over_mean`: of the cost of homes in a batch, over all batches; `waits`: of each request, from its arrival to
    its first token, in costs."""

    max_over_mean: float
    waits: list[float]


@dataclass
class _Home:
    prompts: deque[tuple[PendingPrompt, float]] = field(default_factory=deque)  # and when it arrived

    def pending(self, cost: TokenCost) -> int:
        return cost.of_all([prompt for prompt, _ in self.prompts])


class LockStep:
    """Homes that compute one batch after the other, together."""

    def __init__(self, num_homes: int, budget: int, cost: TokenCost, balanced: bool) -> None:
        self._homes = {Rank(rank): _Home() for rank in range(num_homes)}
        self._turns = cycle(self._homes)
        self._budget = budget
        self._cost = cost
        self._balanced = balanced
        self._most = self._mean = 0.0
        self._waits: list[float] = []
        self.now = 0.0

    def give(self, num_prompt: int, at: float) -> None:
        """A request that arrived at this time."""
        homes = self._homes
        home = min(homes, key=lambda rank: (homes[rank].pending(self._cost), rank)) if self._balanced else None
        homes[home if home is not None else next(self._turns)].prompts.append((PendingPrompt(0, num_prompt), at))

    def step(self) -> bool:
        """One batch; False if there is nothing to do."""
        batch = self._plan()
        if not batch.tokens:
            return False
        self.now += batch.most + self._step_cost
        self._most += batch.most
        self._mean += sum(batch.costs.values()) / len(self._homes)
        for rank, num_tokens in batch.tokens.items():
            self._advance(self._homes[rank], num_tokens)
        return True

    def outcome(self) -> Outcome:
        return Outcome(self._most / self._mean if self._mean else 1.0, self._waits)

    @property
    def _step_cost(self) -> int:
        return self._budget * self._cost.constant // 8  # of a step, whatever is in it

    def _plan(self) -> Batch:
        if not self._balanced:
            waiting = [(at, rank, prompt) for rank, home in self._homes.items() for prompt, at in home.prompts]
            return first_come_batch(((rank, prompt) for _, rank, prompt in sorted(waiting)), self._budget, self._cost)
        prompts = {rank: [prompt for prompt, _ in home.prompts] for rank, home in self._homes.items()}
        return balanced_batch(prompts, self._budget, self._cost, portion=_PORTION, step_cost=self._step_cost)

    def _advance(self, home: _Home, num_tokens: int) -> None:
        while num_tokens:
            (first, left), at = home.prompts.popleft()
            num = min(left, num_tokens)
            num_tokens -= num
            if num < left:
                home.prompts.appendleft((PendingPrompt(first + num, left - num), at))
            else:
                self._waits.append(self.now - at)


def simulate(
    lengths: Sequence[Lengths], num_homes: int, budget: int, cost: TokenCost, balanced: bool, load: float
) -> Outcome:
    """These requests, arriving evenly at `load` times what evenly loaded homes can compute."""
    homes = LockStep(num_homes, budget, cost, balanced)
    mean = sum(cost.of(0, one.num_prompt) for one in lengths) / len(lengths)
    gap = mean / num_homes / load
    for i, one in enumerate(lengths):
        while homes.now < i * gap and homes.step():
            pass
        homes.now = max(homes.now, i * gap)
        homes.give(one.num_prompt, i * gap)
    while homes.step():
        pass
    return homes.outcome()
