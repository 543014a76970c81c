"""The restore benchmark: workers of the bundled model, lost and gone on from in all ways."""

import os

import pytest

from everserve.bench import restore, restore_report
from everserve.bench.restore import Settings, longer_context, measure, ways_of
from everserve.bench.restore_cpu import CpuWorkers
from everserve.bench.restore_stage import Sample, Stage, Way
from everserve.errors import ConfigError, EverserveError
from everserve.kvlog.chains import key_of
from everserve.kvlog.log import Log

WAYS = {
    "anchor": Way("anchor", 32),
    "mirror": Way("mirror", 32),
    "parallel": Way("off", 80),
    "sequential": Way("off", 1),
}
SETTINGS = Settings(points=(40, 80), rounds=1)


@pytest.fixture
def workers(tmp_path):
    return CpuWorkers(longer_context(tmp_path, SETTINGS.context), SETTINGS.context)


def test_all_ways_give_the_same_next_token(workers):
    """As on a GPU, with both logs."""
    samples = measure(Stage(workers, WAYS), SETTINGS)
    assert {(sample.point, sample.way) for sample in samples} == {(n, way) for n in (40, 80) for way in WAYS}
    assert len(samples) == 2 * len(WAYS), "the first round is a warm-up"
    summary = restore_report.summarize(samples, tuple(WAYS))
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
    small, large = Settings(points=(64, 4096), rounds=2), Settings(points=(64,), rounds=2, shape="mixtral")
    assert list(ways_of(small)) == ["log", "parallel", "sequential"]
    assert list(ways_of(large)) == ["anchor", "mirror", "parallel", "sequential"]
    assert ways_of(small)["parallel"].max_batched == 4096, "one prefill"


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
    settings = Settings(points=(point,), rounds=2, shape=shape, most_sequential=most)
    assert [round_ for round_ in range(3) if settings.includes("sequential", point, round_)] == rounds
    assert all(settings.includes("parallel", point, round_) for round_ in range(3))


def make_sample(point: int, round_: int, way: str, time_ms: float, token: int = 7) -> Sample:
    return Sample(point, round_, way, time_ms, 1.0, 1000, token)


def test_a_way_that_was_not_tried_at_some_length(tmp_path, capsys):
    samples = [make_sample(point, round_, "log", 2.0) for point in (64, 128) for round_ in (1, 2)]
    samples += [make_sample(64, 1, "sequential", 50.0)]
    summary = restore_report.summarize(samples, ("log", "sequential"))
    short, long = summary["points"]
    assert short["sequential_is_slower"] == 25 and "sequential" not in long
    assert summary["is_exact"]
    restore_report.show({"model": "a model", "settings": {"rounds": 2}, **summary}, tmp_path / "restore.json")
    shown = capsys.readouterr().out
    assert "25.0x" in shown and "the next token is the same" in shown


def test_other_streams_may_have_other_tokens_but_ways_may_not():
    samples = [make_sample(64, 1, "log", 2.0, 7), make_sample(64, 2, "log", 2.0, 8)]
    assert restore_report.summarize(samples, ("log", "parallel"))["is_exact"]
    samples.append(make_sample(64, 2, "parallel", 2.0, 9))
    assert not restore_report.summarize(samples, ("log", "parallel"))["is_exact"]


def test_layers_are_for_shapes():
    with pytest.raises(ConfigError, match="choose a --shape"):
        restore.run(Settings(points=(64,), rounds=1, num_layers=2), None)
