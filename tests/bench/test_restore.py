"""The restore benchmark: workers of the bundled model, lost and gone on from in all ways."""

import os

import pytest

from everserve.errors import ConfigError, EverserveError
from everserve.kvlog.chains import key_of
from everserve.kvlog.log import Log
from everserve.progress import Progress
from everserve_bench import runner
from everserve_bench.micro import restore
from everserve_bench.micro.restore import Restore, longer_context
from everserve_bench.micro.restore_cpu import CpuWorkers
from everserve_bench.micro.restore_stage import Sample, Stage, Way

WAYS = {
    "anchor": Way("anchor", 32),
    "mirror": Way("mirror", 32),
    "parallel": Way("off", 80),
    "sequential": Way("off", 1),
}
SETTINGS = Restore(points=(40, 80), rounds=1)


@pytest.fixture
def workers(tmp_path):
    return CpuWorkers(longer_context(tmp_path, SETTINGS.context), SETTINGS.context)


def test_all_ways_give_the_same_next_token(workers):
    """As on a GPU, with both logs."""
    samples = [one for found in SETTINGS.rounds_of(Stage(workers, WAYS), Progress()) for one in found]
    assert {(sample.point, sample.way) for sample in samples} == {(n, way) for n in (40, 80) for way in WAYS}
    assert len(samples) == 2 * len(WAYS), "the first round is a warm-up"
    summary = restore.summarize(samples, tuple(WAYS))
    assert summary["is_exact"]
    first, second = summary["points"]
    assert 2 * first["anchor"]["bytes_moved"] == second["anchor"]["bytes_moved"] > 0


def test_kv_that_is_computed_again_does_not_count_as_restored(workers):
    stage = Stage(workers, {"mirror": WAYS["mirror"]})
    loser, shape = stage._losers["mirror"], workers.shape
    with stage.lost(80, seed=1) as spec:
        log = Log(loser.log_fd, shape)
        block = log.find(key_of(spec.id)).blocks[2]
        at = shape.head_bytes + block * shape.block_bytes
        os.pwrite(loser.log_fd, bytes([os.pread(loser.log_fd, 1, at)[0] ^ 1]), at)
        log.close()
        with pytest.raises(EverserveError, match="mirror: 32 tokens came from the log instead of 79"):
            stage.restore(spec, "mirror", 1)


def test_which_ways():
    small, large = Restore(points=(64, 4096), rounds=2), Restore(points=(64,), rounds=2, shape="mixtral")
    assert list(small.ways()) == ["log", "parallel", "sequential"]
    assert list(large.ways()) == ["anchor", "mirror", "parallel", "sequential"]
    assert small.ways()["parallel"].max_batched == 4096, "one prefill"


@pytest.mark.parametrize(
    ("shape", "most", "point", "rounds"),
    [
        ("bundled", None, 4096, [0, 1, 2]),
        ("bundled", 100, 64, [0, 1, 2]),
        ("bundled", 100, 4096, []),
        ("mixtral", 2048, 64, [1]),
        ("mixtral", 2048, 2048, [1]),
        ("mixtral", 2048, 4096, []),
    ],
)
def test_how_often_token_by_token(shape, most, point, rounds):
    settings = Restore(points=(point,), rounds=2, shape=shape, most_sequential=most)
    assert [round_ for round_ in range(3) if settings.includes("sequential", point, round_)] == rounds
    assert all(settings.includes("parallel", point, round_) for round_ in range(3))


def make_sample(point: int, round_: int, way: str, time_ms: float, token: int = 7) -> Sample:
    return Sample(point, round_, way, time_ms, 1.0, 1000, token)


def test_a_way_that_was_not_tried_at_some_length(tmp_path, capsys):
    samples = [make_sample(point, round_, "log", 2.0) for point in (64, 128) for round_ in (1, 2)]
    samples += [make_sample(64, 1, "sequential", 50.0)]
    summary = restore.summarize(samples, ("log", "sequential"))
    short, long = summary["points"]
    assert short["sequential_is_slower"] == 25 and "sequential" not in long
    assert summary["is_exact"]
    runner.show(Restore, {"model": "a model", "settings": {"rounds": 2}, **summary}, tmp_path / "restore.json", None)
    shown = capsys.readouterr().out
    assert "25.0x" in shown and "the next token is the same" in shown


def test_other_streams_may_have_other_tokens_but_ways_may_not():
    samples = [make_sample(64, 1, "log", 2.0, 7), make_sample(64, 2, "log", 2.0, 8)]
    assert restore.summarize(samples, ("log", "parallel"))["is_exact"]
    samples.append(make_sample(64, 2, "parallel", 2.0, 9))
    assert not restore.summarize(samples, ("log", "parallel"))["is_exact"]


def test_layers_are_for_shapes():
    with pytest.raises(ConfigError, match="choose a --shape"):
        runner.run(Restore(points=(64,), rounds=1, num_layers=2), None)
