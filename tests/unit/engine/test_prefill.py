"""Balanced prefill in examples, and what a home takes of a batch."""

from everserve.engine.prefill_share import PrefillShare
from everserve.engine.sequence import Sequence
from everserve.plan.prefill import TokenCost, balanced_batch, first_come_batch
from everserve.tables.ids import Rank
from everserve.tables.prompts import PendingPrompt
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens
from tests.support.toy import make_engine

A, B, C = Rank(0), Rank(1), Rank(2)


def test_the_papers_example():
    """Figure 3: a long request and two short ones, and a budget of three tokens."""
    homes = {A: [PendingPrompt(0, 4)], B: [PendingPrompt(0, 1)], C: [PendingPrompt(0, 1)]}
    assert balanced_batch(homes, 3, TokenCost(1)).tokens == {A: 1, B: 1, C: 1}
    in_order = [(home, prompt) for home, prompts in homes.items() for prompt in prompts]
    assert first_come_batch(in_order, 3, TokenCost(1)).tokens == {A: 3}


def test_a_home_with_a_long_context_gets_fewer_tokens():
    homes = {A: [PendingPrompt(900, 500)], B: [PendingPrompt(0, 500)]}
    batch = balanced_batch(homes, 400, TokenCost(100), step_cost=10**9)
    assert batch.num_tokens == 400 and 4 * batch.tokens[A] <= batch.tokens[B]
    assert abs(batch.costs[A] - batch.costs[B]) < 1100


def test_a_batch_ends_before_one_home_alone_would_make_it_longer():
    homes = {A: [PendingPrompt(5000, 500)], B: [PendingPrompt(0, 100)]}
    whole = balanced_batch(homes, 400, TokenCost(100), step_cost=10**9)
    best = balanced_batch(homes, 400, TokenCost(100), step_cost=1000)
    assert whole.tokens == {A: 300, B: 100}
    assert best.tokens == {A: 1, B: 42}


def test_of_homes_with_the_same_cost_the_one_with_more_to_do_is_first():
    homes = {A: [PendingPrompt(0, 1)], B: [PendingPrompt(0, 9)], C: [PendingPrompt(0, 5)]}
    assert balanced_batch(homes, 1, TokenCost(1)).tokens == {B: 1}
    assert balanced_batch(homes, 2, TokenCost(1)).tokens == {B: 1, C: 1}


def test_nothing_to_do():
    assert balanced_batch({}, 10, TokenCost(1)).num_tokens == 0
    assert balanced_batch({A: []}, 10, TokenCost(1)).most == 0
    assert balanced_batch({A: [PendingPrompt(0, 3)]}, 0, TokenCost(1)).tokens == {}


class Shape:
    """Llama-3.1-8B's, as a plan sees it."""

    weights_per_token = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    values_per_key = 32 * 32 * 128


def test_a_large_models_token_costs_as_much_as_a_long_context():
    assert 20_000 < TokenCost.of_model(Shape()).constant < 35_000
    assert TokenCost(7).of(3, 2) == (7 + 4) + (7 + 5)


# -- what a home takes ---------------------------------------------------------------------------


def stream(num_prompt: int, num_computed: int = 0) -> Sequence:
    spec = RequestSpec(id="a", prompt=as_tokens([1] * num_prompt), params=SamplingParams(max_tokens=5))
    found = Sequence(spec, 16, added_s=0.0)
    found.num_computed = num_computed
    return found


def share(**others: list[PendingPrompt]) -> PrefillShare:
    found = PrefillShare(TokenCost(100), budget=512, portion=16)
    found.use(A, {Rank(int(rank[1:])): tuple(prompts) for rank, prompts in others.items()})
    return found


def test_alone_a_home_takes_all():
    assert share().limit([stream(1000)], 512) == 512
    assert share(r1=[]).limit([stream(1000)], 512) == 512
    assert share(r0=[PendingPrompt(0, 900)]).limit([stream(1000)], 512) == 512, "an old report of its own"


def test_homes_with_the_same_work_take_equal_parts():
    others = {f"r{rank}": [PendingPrompt(0, 1000)] for rank in (1, 2, 3)}
    assert share(**others).limit([stream(1000)], 512) == 128


def test_a_home_always_goes_on():
    assert share(r1=[PendingPrompt(0, 9)] * 16).limit([stream(8000, 7000)], 512) >= 16
    assert share(r1=[PendingPrompt(0, 1000)]).limit([stream(1000)], 5) == 5, "never more than there is room for"


def test_what_is_published_is_what_a_batch_can_hold():
    found = share()
    assert found.first_of([PendingPrompt(0, 400)] * 5) == (PendingPrompt(0, 400),) * 2
    assert len(found.first_of([PendingPrompt(0, 1)] * 50)) == 16


def spec(id: str, num_prompt: int) -> RequestSpec:
    prompt = [(7 * i + len(id)) % 50 + 1 for i in range(num_prompt)]
    return RequestSpec(id=id, prompt=as_tokens(prompt), params=SamplingParams(max_tokens=2))


def test_an_engine_computes_its_part_and_publishes_the_rest():
    limits = {"max_model_len": 300, "num_blocks": 100, "token_cost": TokenCost(100)}
    engine, _ = make_engine(max_num_batched_tokens=64, enable_prefix_caching=False, **limits)
    engine.add(spec("a", 100))
    engine.add(spec("b", 30))
    before = engine.stats()
    assert before.prompts == (PendingPrompt(0, 100),), "no more than a batch holds"
    cost = engine.limits.token_cost
    assert before.pending_prefill_cost == cost.of(0, 100) + cost.of(0, 30)
    engine.share_prefill(A, {B: (PendingPrompt(0, 200),)})
    engine.step()
    assert engine.stats().prompts[0] == PendingPrompt(32, 68), "half of the batch"
    engine.share_prefill(A, {})
    engine.step()
    assert engine.stats().prompts == (PendingPrompt(96, 4), PendingPrompt(0, 30))
    engine.step()
    after = engine.stats()
    assert after.prompts == () and after.pending_prefill_cost == 0
    assert after.prefill_cost == before.pending_prefill_cost
