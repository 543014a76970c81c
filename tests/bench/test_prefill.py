"""`bench prefill`: homes in lock-step, what is made of samples, and the tables."""

import random

import pytest
import torch
import typer

from everserve.client import Stream
from everserve.engine.forward import EagerForward
from everserve.plan.prefill import TokenCost
from everserve_bench import prefill, prefill_beside, prefill_engine, prefill_report
from everserve_bench.cli.degree import _parse_point
from everserve_bench.micro.kernel_times import KernelTime, summed_up
from everserve_bench.prefill import BALANCED, Tally
from everserve_bench.prefill_plan import LockStep, simulate
from everserve_bench.traces import Lengths, read, with_mean_prompt
from tests.support.toy import make_engine

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
    row = make_tally([1, 2]).row("azure-conv", mean_cost=10.0)
    assert row["first_token_ms"][0] == pytest.approx(100) and row["num_requests"] == 2
    assert row["work_max_over_mean"] == 1.5 and row["pending_most"] == pytest.approx((30 + 20) / 2 / 10)
    assert Tally().row("azure-conv", 1.0)["work_max_over_mean"] == 1.0


def test_metrics_are_read():
    text = (
        'everserve_prefill_cost_pending{rank="0"} 5.0\n# HELP everserve_prefill_cost_total x\n'
        'everserve_prefill_cost_total{rank="1"} 1.2e+06\n'
    )
    assert prefill._METRIC.findall(text) == [("_pending", "0", "5.0"), ("_total", "1", "1.2e+06")]


def test_the_tighter_limit_counts():
    given = {"num_prompt": 32, "batch": 4, "step_tokens": 128, "num_steps": 1, "seconds": 0.1}
    of_weights = prefill_engine.row(**given, arithmetic_s=0.02, reading_s=0.04)
    assert of_weights["share"] == pytest.approx(0.4) and of_weights["tokens_per_s"] == pytest.approx(1280)
    assert of_weights["arithmetic_tokens_per_s"] == pytest.approx(6400)
    assert prefill_engine.row(**given, arithmetic_s=0.05, reading_s=0.04)["share"] == pytest.approx(0.5)


def test_a_point_is_tokens_and_prompts():
    assert _parse_point("512x64") == (512, 64)
    for text in ("512", "x64", "0x4", "4x", "ax2"):
        with pytest.raises(typer.BadParameter, match="512x64"):
            _parse_point(text)


def test_kernels_are_summed_up():
    events = [("void gemm<float>(int)", 2000.0), ("_attend", 500.0), ("void gemm<half>(int)", 1000.0)]
    events += [(f"small{i}", 1.0) for i in range(20)]
    found = summed_up(events)
    assert found[:2] == [KernelTime("gemm", 2, 3.0), KernelTime("_attend", 1, 0.5)]
    assert found[-1].name == "others" and sum(kernel.num for kernel in found) == 23 and len(found) == 15


class Machine:
    """A toy engine's steps take 10 ms, and 0.05 ms for each prompt token."""

    def __init__(self) -> None:
        self.now = 0.0

    def forward(self, model):
        def run(batch, experts):
            self.now += 0.010 + 5e-5 * (len(batch.tokens_T) - batch.num_seqs)
            return model(batch)

        return EagerForward(run, torch.device("cpu"))

    def make(self, step_tokens, chunk=None, slowdown=0.0):
        room = {
            "num_blocks": 1000,
            "max_model_len": 400,
            "token_cost": TokenCost(10**6),
            "enable_prefix_caching": False,
        }
        limits = {"max_num_batched_tokens": step_tokens, "max_prefill_while_decoding": chunk or step_tokens}
        engine, _ = make_engine(
            **room, **limits, max_prefill_slowdown=slowdown, make_forward=self.forward, clock=lambda: self.now
        )
        return engine


def test_prompts_beside_streams_that_decode(capsys):
    machine = Machine()
    load = prefill_beside.Load(num_decoding=2, context=8, output=200, num_prompt=200, num_prompts=2)
    fixed, measured = prefill_beside.measure(machine.make, 1024, load, clock=lambda: machine.now)
    assert fixed["pure_ms"] == pytest.approx([10, 10]) and fixed["slowdown"] > 2
    assert measured["slowdown"] <= 1.5 and measured["tokens_per_step"] < fixed["tokens_per_step"]
    prefill_report._show_beside("it", [fixed, measured])
    assert "2 prompts of 200 tokens" in capsys.readouterr().out


def test_the_tables_of_one_engine_alone(tmp_path, capsys):
    given = {"num_prompt": 32, "batch": 4, "step_tokens": 128, "num_steps": 1, "seconds": 0.1}
    row = prefill_engine.row(**given, arithmetic_s=0.02, reading_s=0.04)
    kernel = KernelTime("_attend", 12, 3.0)._asdict()
    profile = {"step_tokens": 128, "step_ms": 4.0, "kernels": [kernel]}
    engine = {"flops": 4e10, "bandwidth": 1e10, "weight_bytes": 2e7, "rows": [row], "profiles": [profile], "beside": []}
    prefill_report.show_alone({"model": "it", "engine": engine}, tmp_path)
    printed = capsys.readouterr().out
    assert "40%" in printed and "128 tokens takes 4.00 ms" in printed and "100.0%" in printed


def test_the_tables(tmp_path, capsys):
    engine = {"prompt": 32, "batch": 4, "tokens_per_s": 900.0, "steps": 1, "share": 0.3}
    engine |= {"arithmetic_tokens_per_s": 3000.0, "reading_tokens_per_s": 9000.0}
    planned = {"trace": "t", "num_homes": 3, "variant": BALANCED, "max_over_mean": 1.1, "waits": [1.0, 2.0, 3.0]}
    prefill_report.show(
        {
            "model": "it",
            "settings": {"num_homes": 3, "mean_prompt": 192, "load": 0.7},
            "clients": [make_tally([1, 2]).row("t", 10.0)],
            "lock_step": [planned],
            "engine": {"flops": 4e10, "bandwidth": 1e10, "weight_bytes": 2e7, "rows": [engine]},
        },
        tmp_path,
    )
    printed = capsys.readouterr().out
    assert "0 requests did not finish" in printed and "40 GFLOP/s" in printed
