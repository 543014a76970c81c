"""What the scaling benchmark measures, what servers are told for a load, and what is reported of it."""

import dataclasses
import itertools
import json
from pathlib import Path

import msgspec
import pytest

from everserve.errors import ConfigError
from everserve_bench import kill, plot, report, runner
from everserve_bench.incident import Round
from everserve_bench.instance import flags_for
from everserve_bench.scenarios import grid, scaling
from everserve_bench.scenarios.grid import GridPoint, PointResult
from everserve_bench.scenarios.scaling import Scaling
from everserve_bench.subject import Subject, subject
from tests.bench.test_analysis import make_round

LARGE = Subject("large", "/some/directory", 32000, 32768, ("--device", "cuda", "--load-format", "dummy"))


def make_settings(**changes) -> Scaling:
    settings = Scaling(
        num_attention=2,
        num_expert=2,
        streams=(16, 64, 256),
        contexts=(512, 2048, 8192),
        max_tokens=400,
        most_tokens=600_000,
        rounds=2,
        warm_s=2.0,
        shape="mixtral",
    )
    return msgspec.structs.replace(settings, **changes)


# -- what servers are told -----------------------------------------------------------------------


def test_the_bundled_model_is_served_as_it_is_by_default():
    with subject() as bundled:
        flags = flags_for(bundled, num_attention=2, num_expert=3, num_streams=8, longest=1532)
    assert flags == ("--attention-workers", "2", "--expert-workers", "3", "--no-enable-prefix-caching")


def test_more_streams_than_a_server_takes_by_itself():
    with subject() as bundled:
        flags = flags_for(bundled, num_attention=2, num_expert=2, num_streams=129, longest=100)
    assert flags[-2:] == ("--max-num-seqs", "129")


def test_a_large_shape_gets_room_for_what_comes_and_no_more():
    flags = flags_for(
        LARGE, num_attention=2, num_expert=2, num_streams=64, longest=1532, spares=2, kv_log="anchor"
    )  # fmt: skip
    told = _pairs(flags)
    assert flags[:4] == LARGE.flags
    assert told["--max-model-len"] == "1536" and told["--max-num-seqs"] == "64"
    assert told["--spares"] == "2" and told["--kv-log"] == "anchor"


def _pairs(flags: tuple[str, ...]) -> dict[str, str]:
    """Flags with a value."""
    return {flag: value for flag, value in itertools.pairwise(flags) if flag.startswith("--")}


def test_no_more_than_the_models_context():
    flags = flags_for(LARGE, num_attention=1, num_expert=1, num_streams=1, longest=32700)
    assert _pairs(flags)["--max-model-len"] == "32768"


def test_one_server_for_all_cells():
    told = _pairs(make_settings().flags(LARGE, [GridPoint(16, 8192, 528), GridPoint(256, 512, 528)]))
    assert told["--max-num-seqs"] == "256" and told["--max-model-len"] == "8960" and told["--block-size"] == "64"


def test_shapes_that_nobody_knows():
    with pytest.raises(ConfigError, match="mixtral"), subject("mixtrall"):
        pass


# -- cells ---------------------------------------------------------------------------------------


def test_cells_small_ones_first_and_the_largest_left_out():
    chosen, left_out = make_settings().cells()
    sizes = [cell.num_prompt_tokens for cell in chosen]
    assert sizes == sorted(sizes) and sizes[-1] == 64 * 8192
    assert {(cell.num_streams, cell.context) for cell in left_out} == {(256, 8192)}
    assert len(chosen) == 8


def test_the_first_stream_still_runs_when_the_last_one_has_begun():
    """Two workers compute 512 tokens of prompts in each step in which the first stream gets a token."""
    (cell,) = make_settings(streams=(64,), contexts=(2048,)).cells()[0]
    assert cell.max_tokens == 400 + 64 * 2048 // (2 * 512)


def test_a_cell_given_twice_is_one():
    chosen, left_out = make_settings(streams=(4, 4), contexts=(100, 100)).cells()
    assert [(cell.num_streams, cell.context) for cell in chosen] == [(4, 100)] and not left_out


@pytest.mark.parametrize(
    ("kv_tokens", "num_attention", "unfit"),
    [
        (6400, 2, set()),  # a survivor has room for all
        (6399, 2, {"attention"}),  # only both together have
        (3200, 2, {"attention"}),
        (3199, 2, {"expert", "attention"}),
        (3200, 3, set()),  # two survivors
        (6400, 1, set()),  # its successor
        (6399, 1, {"expert", "attention"}),
    ],
)
def test_what_fits(kv_tokens, num_attention, unfit):
    """Ten streams of 601 tokens are ten streams of ten blocks."""
    assert set(grid.weigh(GridPoint(10, 501, 100), 64, kv_tokens, num_attention)) == unfit


def test_every_worker_has_its_turn():
    turns = [kill.victims(i, num_attention=2, num_expert=3) for i in range(3)]
    assert turns == [{"expert": 2, "attention": 0}, {"expert": 3, "attention": 1}, {"expert": 4, "attention": 0}]


# -- what is reported ----------------------------------------------------------------------------


def rounds_of(*stalls_s: float, **changes) -> list[Round]:
    return [make_round(fault, stall_s, **changes) for stall_s in stalls_s for fault in grid.FAULTS]


def make_result(*found: PointResult, **settings) -> dict:
    made = make_settings(**settings).told()
    base = {
        "model": "mixtral, 16 layers",
        "settings": made,
        "left_out": [dataclasses.asdict(GridPoint(256, 8192, 900))],
    }
    return base | scaling.summarize(found)


SMALL = PointResult(GridPoint(16, 512, 408), rounds_of(0.05, 0.15))
LARGER = PointResult(GridPoint(64, 512, 432), rounds_of(0.3)[:1], misfits={"attention": "KV for 9 tokens is needed"})
LARGEST = PointResult(GridPoint(256, 512, 528), misfits=dict.fromkeys(grid.FAULTS, "1 requests are refused: HTTP 400"))
BROKEN = PointResult(GridPoint(16, 2048, 432), rounds_of(0.2)[:1], failures={"attention": "no death"})


def test_summary():
    result = make_result(LARGEST, SMALL, LARGER)
    assert [cell["num_streams"] for cell in result["cells"]] == [16, 64, 256]
    small = result["cells"][0]["faults"]
    assert small["expert"]["gap_ms"]["median"] == pytest.approx(100)
    assert small["attention"]["gap_ms"]["max"] == pytest.approx(150)
    assert list(result["cells"][1]["faults"]) == ["expert"] and not result["cells"][2]["faults"]
    assert result["num_kills"] == 5 and result["num_streams_compared"] == 10
    assert "series" not in result["cells"][0]["rounds"][0]


def test_what_does_not_fit_is_no_failure():
    assert Scaling.is_passed(make_result(SMALL, LARGER, LARGEST))


def test_what_went_wrong_is_one():
    assert not Scaling.is_passed(make_result(SMALL, BROKEN))


@pytest.mark.parametrize("wrong", [{"num_lost": 1}, {"num_different": 1}])
def test_one_token_makes_the_benchmark_fail(wrong):
    assert not Scaling.is_passed(make_result(SMALL, PointResult(GridPoint(1, 1, 1), rounds_of(0.1, **wrong))))


@pytest.mark.parametrize(("shape", "is_passed"), [("bundled", True), ("mixtral", False)])
def test_a_harmed_survivor_fails_it_on_a_gpu(shape, is_passed):
    told = make_round().incident
    assert told is not None
    harmed = PointResult(GridPoint(1, 1, 1), [make_round(incident=dataclasses.replace(told, others_lost=1))])
    result = make_result(SMALL, harmed, shape=shape)
    assert result["others_lost"] == 1 and Scaling.is_passed(result) == is_passed


def test_tables(tmp_path, capsys):
    runner.show(Scaling, make_result(SMALL, LARGER, LARGEST, BROKEN), tmp_path / "scaling.json", None)
    shown = capsys.readouterr().out
    assert "100.0 (150.0)" in shown and "does not fit" in shown
    assert "64 streams of 512, attention worker: does not fit: KV for 9 tokens is needed" in shown
    assert "256 streams of 512: does not fit: 1 requests are refused" in shown
    assert "16 streams of 2048, attention worker: FAILED: no death" in shown
    assert "256 of 8192" in shown and "6 kills: no survivor was harmed" in shown
    assert "12 streams, 4800 tokens compared" in shown and "every stream is exact" in shown


def test_a_result_can_be_written(tmp_path):
    result = make_result(SMALL, LARGEST)
    assert json.loads(report.write("scaling", result, tmp_path).read_text())["cells"][0]["context"] == 512


@pytest.mark.parametrize("found", [(SMALL, LARGER, LARGEST), (LARGEST,)])
def test_plot(tmp_path: Path, found: tuple[PointResult, ...]):
    pytest.importorskip("matplotlib")
    path = plot.write_scaling(make_result(*found), tmp_path / "scaling.png")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")
