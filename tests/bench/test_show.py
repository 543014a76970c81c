"""`everserve bench show`: what was measured, once more.

`recorded_results.json`: results of runs, without what `show` does not read.
"""

import json
from pathlib import Path

import pytest

from everserve import provenance
from everserve.errors import ConfigError
from everserve_bench import report, show

RECORDED = json.loads((Path(__file__).parent / "recorded_results.json").read_text())
PUBLISHED = Path(__file__).parents[2] / "bench" / "results"


@pytest.mark.parametrize("name", RECORDED)
def test_results_of_runs(name, tmp_path, capsys):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(RECORDED[name]))
    show.show([path], is_markdown=True)
    told = capsys.readouterr().out
    assert f"### {name}" in told and f"    everserve bench {name}" in told
    assert "| --- | --: |" in told, "a table"
    show.show([path], is_markdown=False)
    assert "| --- |" not in capsys.readouterr().out


def test_a_run_that_was_cut_short(tmp_path, capsys):
    report.keep(
        "overhead", {key: value for key, value in RECORDED["overhead"].items() if key != "environment"}, tmp_path
    )
    for is_markdown in (True, False):
        show.show([tmp_path / "overhead.json"], is_markdown)
        assert "This run was cut short." in capsys.readouterr().out


def test_where_a_result_went_is_not_told(monkeypatch):
    for out in (["--out", "/some/where"], ["--out=/some/where"], ["--json", "/some/where.json"]):
        monkeypatch.setattr("sys.argv", ["everserve", "bench", "decode", *out, "--context", "7"])
        assert provenance.environment()["command"] == "everserve bench decode --context 7"


def test_decode(tmp_path, capsys):
    row = {"shape": "mixtral", "num_layers": 16, "batch": 64, "step_ms": 13.9, "tokens_per_s": 4604.0}
    row |= {"floor_ms": 11.4, "share_of_floor": 0.82, "baseline_ms": None, "baseline_error": "16 streams: too slow"}
    result = {"environment": {"command": "everserve bench decode"}, "settings": {"context": 512}}
    path = tmp_path / "decode.json"
    path.write_text(json.dumps(result | {"bandwidth": 4.2e12, "rows": [row]}))
    show.show([path], is_markdown=True)
    told = capsys.readouterr().out
    assert "| mixtral, 16 layers | 64 | 13.90 | - | - | 4,604 | 82% | - | - |" in told, "as files of old runs"
    assert "transformers: 16 streams: too slow" in told and "4.20 TB/s" in told


def test_what_cannot_be_shown(tmp_path):
    other = tmp_path / "weather.json"
    other.write_text("{}")
    old = tmp_path / "failover-old.json"
    old.write_text(json.dumps({"environment": {"command": ""}, "faults": {}}))
    for path, line in ((other, "its name should begin with"), (tmp_path / "failover.json", "no such file")):
        with pytest.raises(ConfigError, match=line):
            show.show([path], is_markdown=False)
    with pytest.raises(ConfigError, match="it has no 'settings': another version wrote it"):
        show.show([old], is_markdown=False)
    with pytest.raises(ConfigError, match="or `everserve bench publish` shortened it"):
        show.show([PUBLISHED / "failover.json"], is_markdown=False)


@pytest.mark.parametrize(
    ("content", "line"),
    [("junk", "is not JSON"), ("\xff", "is not JSON"), ("[]", "is no result"), ("null", "is no result")],
)
def test_what_is_no_result(tmp_path, content, line):
    path = tmp_path / "failover.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=line):
        show.show([path], is_markdown=False)
