"""Runs a scenario: its subject, its steps, its JSON as it goes, its tables at the end."""

import gc
from pathlib import Path

from everserve.progress import Progress
from everserve_bench import report, tables
from everserve_bench.scenario import Result, Scenario
from everserve_bench.subject import check_gpu, subject


def run(scenario: Scenario, out: Path | None) -> bool:
    """The whole benchmark. Returns whether what it measured works."""
    name = scenario.NAME
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    with subject(scenario.shape, scenario.num_layers) as served, Progress() as progress:
        check_gpu(scenario.shape)
        result: Result = {"model": served.title, "settings": scenario.told()}
        for found in scenario.measure(served, progress):
            result |= found
            report.keep(name, result, out)
    path = report.write(name, result, out)
    show(type(scenario), result, path, scenario.plot(result, path.with_suffix(".png")))
    return scenario.is_passed(result)


def show(scenario: type[Scenario], result: Result, path: Path, plot: Path | None) -> None:
    """Print the tables of a result, which may have been written long ago."""
    tables.show(scenario.show(result))
    beside = f" and {plot}" if plot else "; for the plot: pip install 'everserve[bench]'" if scenario.HAS_PLOT else ""
    print(f"written to {path}{beside}")
