"""`bench prefill`: homes in lock-step, what is made of samples, and the tables."""

import random

import pytest

from everserve.bench import prefill, prefill_report
from everserve.bench.prefill import BALANCED, IN_TURN, Tally
from everserve.bench.prefill_plan import LockStep, simulate
from everserve.bench.traces import Lengths, read, with_mean_prompt
from everserve.client import Stream
from everserve.plan.prefill import TokenCost

COST = TokenCost(500)


def test_a_mean_prompt_is_scaled_before_the_longest_are_cut():
    found = with_mean_prompt(read("mooncake-conv"), 200, most=2048)
    mean = sum(one.num_prompt for one in found) / len(found)
    assert 180 < mean <= 201 and max(one.num_prompt for one in found) <= 2048


def test_in_turn_and_as_they_come():
    homes = LockStep(2, budget=100, cost=COST, balanced=False)
    homes.give(150, 0.0)
    homes.give(10, 0.0)
    assert homes.step() and homes.outcome().waits == [], "all tokens of the first batch are of the first prompt"
    assert homes.step() and len(homes.outcome().waits) == 2
    assert not homes.step()


def test_the_home_with_the_least_to_do_gets_the_next():
    homes = LockStep(2, budget=100, cost=COST, balanced=True)
    for num_prompt in (150, 10, 10, 10):
        homes.give(num_prompt, 0.0)
    assert homes.step() and len(homes.outcome().waits) >= 2
    while homes.step():
        pass
    assert len(homes.outcome().waits) == 4


@pytest.mark.parametrize("num_homes", [3, 7])
def test_balanced_prompts_wait_less_and_all_come_to_their_end(num_homes):
    generator = random.Random(num_homes)
    lengths = [Lengths(round(generator.lognormvariate(5, 1)) + 1, 1) for _ in range(200)]
    ours, theirs = (simulate(lengths, num_homes, 512, COST, balanced, load=0.6) for balanced in (True, False))
    assert len(ours.waits) == len(theirs.waits) == 200 and min(*ours.waits, *theirs.waits) > 0
    assert 1.0 <= ours.max_over_mean < theirs.max_over_mean <= num_homes
    assert sum(ours.waits) < sum(theirs.waits)


def stream(tokens, first_s=0.1):
    arrivals = [first_s + 0.01 * i for i in range(len(tokens))]
    return Stream(0.0, arrivals, tokens, finish_reason="length")


def make_tally(tokens):
    tally = Tally(streams=[stream(tokens), stream(tokens, 0.3)])
    tally.add_work({0: 100.0}, {0: 400.0, 1: 100.0})
    tally.add_pending({0: 30.0, 1: 10.0})
    tally.add_pending({})
    tally.add_pending({0: 0.0, 1: 20.0})
    return tally


def test_a_row_says_how_uneven_homes_were():
    row = make_tally([1, 2]).row("azure-conv", BALANCED, mean_cost=10.0)
    assert row["first_token_ms"][0] == pytest.approx(100) and row["num_requests"] == 2
    assert row["work_max_over_mean"] == 1.5 and row["pending_most"] == pytest.approx((30 + 20) / 2 / 10)
    assert Tally().row("azure-conv", IN_TURN, 1.0)["work_max_over_mean"] == 1.0


def test_answers_are_compared():
    same = {("t", BALANCED): make_tally([1, 2]), ("t", IN_TURN): make_tally([1, 2])}
    assert prefill._num_different(same) == 0
    assert prefill._num_different(same | {("t", IN_TURN): make_tally([1, 3])}) == 2


def test_metrics_are_read():
    text = (
        'everserve_prefill_cost_pending{rank="0"} 5.0\n# HELP everserve_prefill_cost_total x\n'
        'everserve_prefill_cost_total{rank="1"} 1.2e+06\n'
    )
    assert prefill._METRIC.findall(text) == [("_pending", "0", "5.0"), ("_total", "1", "1.2e+06")]


def test_the_tables(tmp_path, capsys):
    engine = {"prompt": 32, "batch": 4, "tokens_per_s": 900.0, "steps": 1, "share": 0.3}
    engine |= {"arithmetic_tokens_per_s": 3000.0, "reading_tokens_per_s": 9000.0}
    planned = {"trace": "t", "num_homes": 3, "variant": BALANCED, "max_over_mean": 1.1, "waits": [1.0, 2.0, 3.0]}
    prefill_report.show(
        {
            "model": "it",
            "settings": {"num_homes": 3, "mean_prompt": 192, "load": 0.7},
            "clients": [make_tally([1, 2]).row("t", variant, 10.0) for variant in (BALANCED, IN_TURN)],
            "lock_step": [planned],
            "engine": {"flops": 4e10, "bandwidth": 1e10, "weight_bytes": 2e7, "rows": [engine]},
            "num_different": 0,
        },
        tmp_path,
    )
    printed = capsys.readouterr().out
    assert "the same tokens on both; 0 requests did not finish" in printed and "40 GFLOP/s" in printed
