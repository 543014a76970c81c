"""What the overhead and checkpoint benchmarks start, and what they make of it. With real servers: tests/process."""

import dataclasses
import inspect

import pytest

from everserve.bench import checkpoint, overhead, overhead_report
from everserve.bench.overhead_report import ALL_OFF, ONE_PROCESS, REFERENCE
from everserve.bench.slices import Slice, _reason
from everserve.bench.subject import Subject
from everserve.bench.variants import Difference, Measurements, Settings, VariantResults, _room_for
from everserve.cli.serve import serve
from everserve.errors import ConfigError, EverserveError

SETTINGS = Settings(streams=(8, 1), prompt=500, max_tokens=100, rounds=3)
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
    settings = overhead.Settings(streams=(1,), prompt=1, max_tokens=16, rounds=1, variants=variants)
    with pytest.raises(ConfigError, match=message):
        overhead.run(settings, None)


@pytest.mark.parametrize("run", [overhead.run, checkpoint.run])
def test_a_shape_that_does_not_exist(run):
    settings = overhead.Settings(
        streams=(1,), prompt=1, max_tokens=16, rounds=1, shape="round", variants=tuple(overhead.GPU_VARIANTS)
    )
    with pytest.raises(ConfigError, match="--shape round: choose bundled, small-moe"):
        run(settings, None)


def test_a_gpu_has_room_for_what_is_asked_and_no_more():
    settings = Settings(streams=(8, 1), prompt=500, max_tokens=100, rounds=3, shape="mixtral")
    assert _room_for(settings, SERVED) == ("--max-model-len", "640", "--max-num-seqs", "8")
    assert "--max-model-len" not in _room_for(SETTINGS, SERVED)


def test_streams_that_are_too_long():
    with pytest.raises(ConfigError, match="a model has room for 599 tokens"):
        _room_for(SETTINGS, Subject("a model", "somewhere", 100, max_context=599))


# -- what became of them -------------------------------------------------------------------------


class Answering:
    """A server that answers what it is told to."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def measure(self, prompts, max_tokens):
        return make_slice(10.0), [list(self.tokens) for _ in prompts]


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
    found = VariantResults("a model", tally.samples, tally.differences(), {}, {}, {})
    settings = dataclasses.replace(SETTINGS, streams=(2,))
    overhead_report.show(overhead_report.result_of(found, {}, settings, "a"), tmp_path / "x.json", "a")
    shown = capsys.readouterr().out
    assert "tokens that differ between variants: 10\n" in shown
    assert "  c, slice 1: 2 of 2 streams, from token 1 on (the last of them from 1 on)\n" in shown


def test_without_the_reference_there_is_nothing_to_say():
    with pytest.raises(ConfigError, match=r"variant 'a' \(--x\) does not start"):
        make_tally().give_up("a", "does not start: no memory")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the server did not start: everserve: no memory: buy some", "no memory: buy some"),
        ("the server did not start: ", "the server did not start: it said nothing"),
        ("the server did not start: Usage\n╭───╮\n│ --kv-log x: choose │\n╰───╯", "--kv-log x: choose"),
        (
            "the server was not ready after 180 s: a\nloaded 3 of 8",
            "the server was not ready after 180 s: loaded 3 of 8",
        ),
        ("the server was not ready after 180 s: ", "the server was not ready after 180 s: it said nothing"),
    ],
)
def test_why_a_server_does_not_start(text, expected):
    assert _reason(EverserveError(text)) == expected


def test_the_price_of_dividing_and_what_is_missing(tmp_path, capsys):
    samples = {
        (ONE_PROCESS, 8): [make_slice(ms) for ms in (10.0, 20.0)],
        (REFERENCE, 8): [make_slice(ms) for ms in (10.4, 20.8)],
        ("4+4", 8): [make_slice(ms) for ms in (11.0, 22.0)],
    }
    found = VariantResults("a model", samples, [], {}, dict.fromkeys(("2+2",), 0), {"8+8": "does not start: no memory"})
    settings = Settings(streams=(8,), prompt=512, max_tokens=192, rounds=1, shape="mixtral")
    result = overhead_report.result_of(found, overhead.GPU_VARIANTS, settings)
    rows = {row["variant"]: row for row in result["variants"]}
    assert rows["4+4"]["itl_p50_ms_to_one process"]["median"] == pytest.approx(1.1)
    overhead_report.show(result, tmp_path / "overhead.json")
    shown = capsys.readouterr().out
    assert "p50, 2+2 / one process: 1.040 (1.040-1.040)" in shown and "p50, one process /" not in shown
    assert "8+8: does not start: no memory" in shown and "idle" not in shown
