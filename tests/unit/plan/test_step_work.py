"""What one step may cost: long prompts go in smaller chunks towards their end, and every stream stays the same."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.plan.steps import StepWork, step_tokens
from tests.support.specs import some_dense, with_experts
from tests.support.toy import make_engine, run_alone, spec

BUNDLED = ModelConfig.from_directory(str(DEMO_MODEL))
WORK = StepWork(per_token=10.0, per_key=1.0, most=150.0)
COSTS = st.floats(0.1, 1e3)


@given(per_token=COSTS, per_key=COSTS, first=st.integers(0, 1000), left=st.floats(0, 1e6))
def test_affordable_is_the_most_that_fits(per_token, per_key, first, left):
    work = StepWork(per_token, per_key, most=1e9)
    num = work.affordable(first, left)
    assert work.cost(first, num) <= left * (1 + 1e-9)
    assert work.cost(first, num + 1) > left * (1 - 1e-9)


@pytest.mark.parametrize(
    "num_experts, experts_per_token, expected",
    [(128, 8, 8192), (8, 2, 2048), (64, 8, 4096), (60, 4, 8192), (512, 10, 8192), (16, 16, 2048)],
)
def test_a_step_is_so_large_that_experts_have_enough_rows(num_experts, experts_per_token, expected):
    model = with_experts(BUNDLED, number=num_experts, top_k=experts_per_token)
    assert step_tokens(model) == expected
    assert step_tokens(some_dense(model)) == 2048


def test_no_step_costs_more_and_every_stream_is_the_same():
    requests = [spec(f"r{i}", [(7 * i + j) % 97 for j in range(20 + 12 * i)], max_tokens=10) for i in range(3)]
    engine, _ = make_engine(num_blocks=64, max_num_batched_tokens=64, max_prefill_while_decoding=64, work=WORK)
    streams: dict[str, list[int]] = {}
    largest, smallest = 0, 64
    for request in requests:
        engine.add(request)
    while engine.has_work:
        before = {s.id: s.num_computed for s in (*engine.scheduler.waiting, *engine.scheduler.running)}
        outputs = engine.step().outputs
        after = {s.id: s.num_computed for s in engine.scheduler.running}
        prompts = {id: after[id] - first for id, first in before.items() if after.get(id, 0) - first > 1}
        assert sum(WORK.cost(before[id], num) for id, num in prompts.items()) <= WORK.most
        for num in prompts.values():
            largest, smallest = max(largest, num), min(smallest, num)
        for output in outputs:
            streams.setdefault(output.id, []).append(output.token)
        engine.check()
    assert streams == {request.id: run_alone(request) for request in requests}
    assert largest >= 8 > smallest, "chunks shrink as contexts grow"


def test_a_prompt_goes_on_even_if_a_single_token_costs_more_than_a_step_may():
    engine, _ = make_engine(work=replace(WORK, most=5.0))
    request = spec("a", list(range(9)), max_tokens=4)
    engine.add(request)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [output.token for output in engine.step().outputs]
    assert tokens == run_alone(request)


def test_workers_that_share_a_device_share_its_time():
    model = ModelConfig.from_directory(DEMO_MODEL)
    alone, shared = StepWork.of(model, 1), StepWork.of(model, 4)
    assert shared.most == alone.most / 4 and shared.per_token == alone.per_token
