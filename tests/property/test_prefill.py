"""Balanced prefill, for any prompts: never more than the budget, as even as can be, and every prompt gets its turn."""

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from everserve.plan.prefill import TokenCost, balanced_batch, first_come_batch
from everserve.tables.ids import Rank
from everserve.tables.prompts import PendingPrompt
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens
from tests.support.examples import examples
from tests.support.toy import make_engine, run_alone

prompts = st.lists(st.builds(PendingPrompt, st.integers(0, 300), st.integers(0, 90)), max_size=4)
homes_of = st.dictionaries(st.integers(0, 5).map(Rank), prompts, max_size=5)
costs = st.integers(1, 50).map(TokenCost)


def num_pending(prompts):
    return sum(prompt.num_tokens for prompt in prompts)


@examples(20)
@given(homes_of, st.integers(0, 200), costs, st.integers(1, 40), st.integers(0, 5000))
def test_a_batch_keeps_to_its_budget_and_has_something_of_everyone(homes, budget, cost, portion, step_cost):
    batch = balanced_batch(homes, budget, cost, portion=portion, step_cost=step_cost)
    assert batch.num_tokens <= budget
    assert all(0 < num <= num_pending(homes[home]) for home, num in batch.tokens.items())
    busy = {home for home, prompts in homes.items() if num_pending(prompts)}
    assert set(batch.tokens) <= busy and len(batch.tokens) == min(len(busy), budget)
    for home, num in batch.tokens.items():
        assert batch.costs[home] == cost.of_all(first_tokens(homes[home], num)), "in the order in which they came"


@examples(20)
@given(homes_of, st.integers(1, 200), costs, st.integers(1, 40), st.integers(0, 5000), st.randoms())
def test_every_home_finds_the_same_batch(homes, budget, cost, portion, step_cost, shuffler):
    items = list(homes.items())
    shuffler.shuffle(items)
    batch = balanced_batch(homes, budget, cost, portion=portion, step_cost=step_cost)
    assert balanced_batch(dict(items), budget, cost, portion=portion, step_cost=step_cost) == batch


def first_tokens(prompts, num):
    """The prompts that so many tokens are of."""
    for first, num_tokens in prompts:
        yield PendingPrompt(first, min(num, num_tokens))
        num -= min(num, num_tokens)


small = st.dictionaries(
    st.integers(0, 2).map(Rank),
    st.lists(st.builds(PendingPrompt, st.integers(0, 30), st.integers(1, 6)), min_size=1, max_size=2),
    min_size=1,
    max_size=3,
)


@examples(20)
@given(small, st.integers(1, 20), costs, st.integers(1, 4))
def test_the_most_loaded_home_has_at_most_a_portion_more_than_in_the_best_division(homes, budget, cost, portion):
    batch = balanced_batch(homes, budget, cost, portion=portion)
    divisions = itertools.product(*(range(num_pending(prompts) + 1) for prompts in homes.values()))
    best = min(
        max(cost.of_all(list(first_tokens(prompts, num))) for prompts, num in zip(homes.values(), nums, strict=True))
        for nums in divisions
        if sum(nums) == batch.num_tokens
    )
    most_of_a_portion = max(
        cost.of(first + num_tokens - min(portion, num_tokens), min(portion, num_tokens))
        for prompts in homes.values()
        for first, num_tokens in prompts
    )
    assert batch.most <= best + most_of_a_portion


@examples(8)
@given(homes_of, st.integers(8, 100), st.integers(1, 30), st.integers(0, 3000))
def test_prompts_are_not_starved_by_others_that_keep_coming(homes, budget, portion, step_cost):
    """Home 0 gets a new short prompt before every batch."""
    cost = TokenCost(5)
    left = {home: list(prompts) for home, prompts in homes.items()}
    num_needed = sum(map(num_pending, homes.values())) + sum(map(len, homes.values()))
    for _ in range(num_needed + 1):
        others = {home: prompts for home, prompts in left.items() if home != 0 and num_pending(prompts)}
        if not others:
            return
        first = [*left.get(Rank(0), []), PendingPrompt(0, 3)]
        batch = balanced_batch({**others, Rank(0): first}, budget, cost, portion=portion, step_cost=step_cost)
        for home in others:
            assert batch.tokens[home] >= 1
            left[home] = rest(left[home], batch.tokens[home])
        left[Rank(0)] = rest(first, batch.tokens[Rank(0)])
    raise AssertionError("it should be over")


def rest(prompts, num):
    done = list(first_tokens(prompts, num))
    after = [PendingPrompt(p.first + d.num_tokens, p.num_tokens - d.num_tokens) for p, d in zip(prompts, done)]  # noqa: B905
    return [prompt for prompt in after if prompt.num_tokens]


@examples(8)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.lists(homes_of, max_size=12), st.integers(1, 50))
def test_streams_are_the_same_whatever_a_home_was_told_of_others(prompts, told, constant):
    engine, _ = make_engine(num_blocks=30, token_cost=TokenCost(constant))
    specs = [
        RequestSpec(
            id=str(i), prompt=as_tokens(1 + (i + 3 * j) % 40 for j in range(num)), params=SamplingParams(max_tokens=4)
        )
        for i, num in enumerate(prompts)
    ]
    for spec in specs:
        engine.add(spec)
    tables, tokens = iter(told), {spec.id: [] for spec in specs}
    while engine.has_work:
        engine.share_prefill(Rank(0), next(tables, {}))
        pending_before = engine.stats().pending_prefill_cost
        for output in engine.step().outputs:
            tokens[output.id].append(output.token)
        after = engine.stats()
        assert after.pending_prefill_cost <= pending_before and (after.pending_prefill_cost or not after.prompts)
    engine.check()
    assert tokens == {spec.id: run_alone(spec) for spec in specs}


def max_over_mean(batch):
    """With four homes."""
    return 4 * batch.most / sum(batch.costs.values())


def test_random_prompts_are_divided_more_evenly_than_as_they_come():
    generator, cost = random.Random("prefill"), TokenCost(100)
    for _ in range(50):
        homes = {
            Rank(home): [PendingPrompt(generator.randrange(3000), generator.randrange(1, 800)) for _ in range(3)]
            for home in range(4)
        }
        in_order = [(home, prompts[turn]) for turn in range(3) for home, prompts in homes.items()]
        ours, theirs = balanced_batch(homes, 256, cost, step_cost=25600), first_come_batch(in_order, 256, cost)
        assert max_over_mean(ours) * 1.5 < max_over_mean(theirs)
