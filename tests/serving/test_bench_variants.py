"""Variants of a real server, one at a time: as on a GPU, but with the bundled model."""

import pytest

from everserve.bench import variants
from everserve.bench.variants import Settings
from everserve.errors import ConfigError

SETTINGS = Settings(streams=(2,), prompt=16, max_tokens=48, rounds=1)


@pytest.mark.long
def test_one_at_a_time(monkeypatch):
    """Each is started anew; one that does not start says why and stops nobody else."""
    monkeypatch.setattr(variants, "SLICES", 2)
    flags = {"plain": (), "no log": ("--kv-log", "off"), "wrong": ("--kv-log", "nowhere")}
    (found,) = variants.compare("test", flags, "plain", SETTINGS, at_once=False)
    assert found.model == "bundled model"
    assert {key: len(slices) for key, slices in found.samples.items()} == {
        ("plain", 2): SETTINGS.rounds * 2,
        ("no log", 2): SETTINGS.rounds * 2,
    }
    assert all(slice_.tokens_per_s > 0 for slices in found.samples.values() for slice_ in slices)
    assert found.num_different == 0 and found.idle_cores == {}
    assert list(found.not_measured) == ["wrong"]
    assert found.not_measured["wrong"].startswith("does not start: ") and "nowhere" in found.not_measured["wrong"]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_reference_that_does_not_start(at_once):
    with pytest.raises(ConfigError, match=r"variant 'wrong' .* does not start: .*nowhere"):
        list(variants.compare("test", {"wrong": ("--kv-log", "nowhere")}, "wrong", SETTINGS, at_once=at_once))
