"""Variants of a real server, one at a time: as on a GPU, but with the bundled model."""

import dataclasses

import pytest

from everserve.errors import ConfigError
from everserve.progress import Progress
from everserve_bench import variants
from everserve_bench.subject import subject
from everserve_bench.variants import Load

LOAD = Load(streams=(2,), prompt=16, max_tokens=48, rounds=1, one_at_a_time=True)


@pytest.mark.long
def test_one_at_a_time(monkeypatch):
    """Each is started anew; one that does not start says why and stops nobody else."""
    monkeypatch.setattr(variants, "SLICES", 2)
    flags = {"plain": (), "no log": ("--kv-log", "off"), "wrong": ("--kv-log", "nowhere")}
    with subject() as served:
        (found,) = variants.compare(flags, "plain", served, LOAD, Progress())
    assert {key: len(slices) for key, slices in found.samples.items()} == {
        ("plain", 2): LOAD.rounds * 2,
        ("no log", 2): LOAD.rounds * 2,
    }
    assert all(slice_.tokens_per_s > 0 for slices in found.samples.values() for slice_ in slices)
    assert found.num_different == 0 and found.idle_cores == {}
    assert list(found.not_measured) == ["wrong"]
    assert found.not_measured["wrong"].startswith("does not start: ") and "nowhere" in found.not_measured["wrong"]


@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_a_reference_that_does_not_start(one_at_a_time):
    load = dataclasses.replace(LOAD, one_at_a_time=one_at_a_time)
    wrong = {"wrong": ("--kv-log", "nowhere")}
    with subject() as served, pytest.raises(ConfigError, match=r"variant 'wrong' .* does not start: .*nowhere"):
        list(variants.compare(wrong, "wrong", served, load, Progress()))
