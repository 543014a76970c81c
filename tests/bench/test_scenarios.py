"""A scenario's fields are flags of its command, with the defaults of what its shape is for; its columns are shown."""

import pytest
from typer.testing import CliRunner

from everserve.errors import ConfigError
from everserve_bench import runner, tables
from everserve_bench.cli import bench_app
from everserve_bench.scenarios import SCENARIOS
from everserve_bench.tables import Table, interval, medians, text, worst


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Scenarios that commands would run."""
    scenarios = []
    monkeypatch.setattr(runner, "run", lambda scenario, out: scenarios.append(scenario) or True)
    monkeypatch.chdir(tmp_path)  # where results would go
    return scenarios


def command(line: str) -> None:
    CliRunner().invoke(bench_app, line.split(), catch_exceptions=False, standalone_mode=False)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.NAME)
def test_each_has_a_command(ran, scenario):
    command(scenario.NAME)
    assert [type(one) for one in ran] == [scenario]


def test_flags_are_fields(ran):
    command("failover --streams 3 --layers 2 --shape small-moe --kv-log anchor --warm-s 1.5")
    (one,) = ran
    assert (one.num_streams, one.num_layers, one.shape, one.kv_log, one.warm_s) == (3, 2, "small-moe", "anchor", 1.5)
    assert one.told().keys() >= {"num_streams", "rounds", "shape"}


def test_flags_that_are_repeatable(ran):
    command("overhead --streams 4 --streams 2 --variant 2+2 --variant 1+1")
    (one,) = ran
    assert one.streams == (4, 2) and list(one.variants_told()) == one.told()["variants"] == ["2+2", "1+1"]


def test_defaults_are_of_what_the_shape_is_for(ran):
    command("overhead")
    command("overhead --shape mixtral --rounds 2")
    on_cpu, on_gpu = ran
    assert (on_cpu.streams, on_cpu.prompt, on_cpu.rounds) == ((8, 1), 32, 15)
    assert (on_gpu.streams, on_gpu.prompt, on_gpu.rounds) == ((64,), 512, 2)
    assert "8+8" in on_gpu.told()["variants"] and "8+8" not in on_cpu.told()["variants"]


def test_what_a_row_does_not_have_is_empty(capsys):
    spread = {"median": 1.0, "min": 0.5, "max": 2000.0}
    columns = [
        *(("name", text("name")), ("ms", worst("gap_ms")), ("s", worst("gap_ms", 2, 1e3))),
        *(("both", medians("gap_ms", "more")), ("ratio", interval("ratio", 1))),
    ]
    ratio = {"median": 0.5, "low": 0.4, "high": 0.6}
    with tables.report.markdown(True):
        tables.show(
            [
                Table("found", columns, [{"name": "all", "gap_ms": spread, "more": spread, "ratio": ratio}, {}]),
                "a line",
                Table("nothing", columns, []),
            ]
        )
    shown = capsys.readouterr().out
    assert "| all | 1.0 (2000.0) | 1000 (2000000) | 1.0 / 1.0 | 0.5 (0.4-0.6) |\n|  |  |  |  |  |\n" in shown
    assert shown.endswith("a line\n") and "nothing" not in shown


def test_numbers_in_one_flag(ran):
    command("scale")
    command("scale --sizes 2,4,3")
    assert [one.sizes for one in ran] == [(2, 4, 8, 3), (2, 4, 3)]
    for wrong in ("2", "2,x", "2,4000"):
        with pytest.raises(ConfigError, match=r"--sizes: two or more numbers from 1 to"):
            command(f"scale --sizes {wrong}")
