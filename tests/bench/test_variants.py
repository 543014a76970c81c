"""What the overhead and checkpoint benchmarks start, and what they make of it. With real servers: tests/process."""

import dataclasses
import inspect

import pytest

from everserve.cli.serve import serve
from everserve.errors import ConfigError, EverserveError, UserError
from everserve_bench import runner
from everserve_bench.scenarios import checkpoint, overhead
from everserve_bench.scenarios.checkpoint import Checkpoint
from everserve_bench.scenarios.comparison import Comparison
from everserve_bench.scenarios.overhead import ALL_OFF, ONE_PROCESS, REFERENCE, Overhead
from everserve_bench.slices import Slice, _reason
from everserve_bench.subject import Subject
from everserve_bench.variants import Difference, Load, Measurements, VariantResults, _room_for

LOAD = Load(streams=(8, 1), prompt=500, max_tokens=100, rounds=3)
SERVED = Subject("a model", "somewhere", vocab_size=100, max_context=4096)


def make_slice(itl_ms: float) -> Slice:
    return Slice(tokens_per_s=1e3 / itl_ms, itl_p50_ms=itl_ms, itl_p99_ms=itl_ms, cpu_ms_per_token=itl_ms, stolen=0.0)


# -- which variants ------------------------------------------------------------------------------


@pytest.mark.parametrize("variants", [overhead.VARIANTS, overhead.GPU_VARIANTS, checkpoint.VARIANTS])
def test_serve_knows_all_flags(variants):
    known = {f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters}
    given = {flag for flags in variants.values() for flag in flags if flag.startswith("--")}
    assert given and given <= known


@pytest.mark.parametrize("variants", [overhead.VARIANTS, overhead.GPU_VARIANTS])
def test_all_off_is_everything_that_is_off_in_another_variant(variants):
    off = [set(flags) - set(variants[REFERENCE]) for name, flags in variants.items() if name.startswith("2+2, ")]
    assert len(off) >= 4
    assert set().union(*off) == set(variants[ALL_OFF]) - set(variants[REFERENCE])


@pytest.mark.parametrize(("variants", "message"), [(("2+2", "3+3"), "'3\\+3'"), (("one process",), "must be among")])
def test_variants_that_cannot_be_compared(variants, message):
    with pytest.raises(ConfigError, match=message):
        Overhead(streams=(1,), prompt=1, max_tokens=16, rounds=1, variants=variants).check()


@pytest.mark.parametrize("scenario", [Overhead, Checkpoint])
def test_a_shape_that_does_not_exist(scenario):
    with pytest.raises(ConfigError, match="--shape round: choose bundled, small-moe"):
        runner.run(scenario(streams=(1,), prompt=1, max_tokens=16, rounds=1, shape="round"), None)


def test_a_gpu_has_room_for_what_is_asked_and_no_more():
    on_gpu = dataclasses.replace(LOAD, one_at_a_time=True)
    assert _room_for(on_gpu, SERVED) == ("--max-model-len", "640", "--max-num-seqs", "8")
    assert "--max-model-len" not in _room_for(LOAD, SERVED)


def test_streams_that_are_too_long():
    with pytest.raises(ConfigError, match="a model has room for 599 tokens"):
        _room_for(LOAD, Subject("a model", "somewhere", 100, max_context=599))


# -- what became of them -------------------------------------------------------------------------


class Answering:
    """A server that answers what it is told to."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def measure(self, prompts, max_tokens):
        return make_slice(10.0), [list(self.tokens) for _ in prompts]


class OfA(Comparison, frozen=True, kw_only=True):
    """Variants beside `a`."""

    REFERENCE = "a"


def make_tally() -> Measurements:
    return Measurements("a", {"a": ("--x",), "b": (), "c": ()}, (2,))


def test_tokens_are_compared_in_warm_ups_too():
    tally = make_tally()
    for is_warm_up in (True, False):
        for name, server in {"b": Answering(1, 2, 4), "a": Answering(1, 2, 3), "c": Answering(1, 2, 3)}.items():
            tally.add(name, server, [[5], [6]], 3, is_warm_up)
    assert tally.differences() == [
        Difference("b", 2, slice_, stream, first=2, num_tokens=1) for slice_ in (0, 1) for stream in (0, 1)
    ]
    assert {key: len(slices) for key, slices in tally.samples.items()} == {("a", 2): 1, ("b", 2): 1, ("c", 2): 1}


def test_a_variant_that_is_given_up_leaves_nothing_but_its_reason():
    tally = make_tally()
    for name in "bac":
        tally.add(name, Answering(1), [[5], [6]], 1, is_warm_up=False)
    tally.add("b", Answering(2), [[5], [6]], 1, is_warm_up=False)
    tally.give_up("b", "does not start: no memory")
    assert tally.not_measured == {"b": "does not start: no memory"}
    assert list(tally.samples) == [("a", 2), ("c", 2)] and tally.differences() == []


def test_where_streams_differ(tmp_path, capsys):
    tally = make_tally()
    for expected in ((1, 2, 3), (4, 5, 6)):
        tally.add("a", Answering(*expected), [[5], [6]], 3, is_warm_up=False)
        tally.add("b", Answering(*expected), [[5], [6]], 3, is_warm_up=False)
        tally.add("c", Answering(4, 9), [[5], [6]], 3, is_warm_up=False)
    assert [(found.slice, found.first, found.num_tokens) for found in tally.differences()] == [
        (0, 0, 3), (0, 0, 3), (1, 1, 2), (1, 1, 2),
    ]  # fmt: skip
    found = VariantResults(tally.samples, tally.differences(), {}, {}, {})
    result = {"settings": {"streams": [2], "prompt": 500, "max_tokens": 100}, **OfA.result_of(found, {})}
    runner.show(OfA, result, tmp_path / "x.json", None)
    shown = capsys.readouterr().out
    assert "tokens that differ between variants: 10\n" in shown
    assert "  c, slice 1: 2 of 2 streams, from token 1 on (the last of them from 1 on)\n" in shown


def test_without_the_reference_there_is_nothing_to_say():
    with pytest.raises(ConfigError, match=r"variant 'a' \(--x\) does not start"):
        make_tally().give_up("a", "does not start: no memory")


def test_why_a_server_does_not_start():
    assert _reason(UserError("no memory: buy some")) == "no memory: buy some"
    assert _reason(EverserveError("the server ended (exit status 1): a\nloaded 3 of 8")) == "loaded 3 of 8"


def test_the_price_of_dividing_and_what_is_missing(tmp_path, capsys):
    samples = {
        (ONE_PROCESS, 8): [make_slice(ms) for ms in (10.0, 20.0)],
        (REFERENCE, 8): [make_slice(ms) for ms in (10.4, 20.8)],
        ("4+4", 8): [make_slice(ms) for ms in (11.0, 22.0)],
    }
    found = VariantResults(samples, [], {}, dict.fromkeys(("2+2",), 0), {"8+8": "does not start: no memory"})
    settings = {"streams": [8], "prompt": 512, "max_tokens": 192}
    result = {"settings": settings, **Overhead.result_of(found, overhead.GPU_VARIANTS)}
    rows = {row["variant"]: row for row in result["variants"]}
    assert rows["4+4"]["itl_p50_ms_to_one process"]["median"] == pytest.approx(1.1)
    runner.show(Overhead, result, tmp_path / "overhead.json", None)
    shown = capsys.readouterr().out
    assert "p50, 2+2 / one process: 1.040 (1.040-1.040)" in shown and "p50, one process /" not in shown
    assert "8+8: does not start: no memory" in shown and "idle" not in shown
