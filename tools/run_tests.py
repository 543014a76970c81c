"""Runs pytest once or several times and ends with one line about all of it: `N passed, N failed, N skipped`.

    python -m tools.run_tests [arguments of pytest] [--then arguments of the next run]...

`make test` needs two runs, and the last line of the second one is not the result. The status is 0 only if every run
ended well, no test failed and at least one ran: where all are skipped, nothing was tested.
Each run is a process of its own that loads this module as a plugin, which counts.
"""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

_NEXT_RUN, _COUNT_INTO = "--then", "--count-into"
_WELL = (0, 5)  # 5: pytest found no tests, which is for the sum to judge


@dataclass(frozen=True)
class Counts:
    """Of tests, each once: one whose clean-up fails after it has passed has failed. So has a file that cannot be
    imported."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def pytest_addoption(parser: Any) -> None:
    parser.addoption(_COUNT_INTO, metavar="FILE", help="write the numbers of tests there, as JSON")


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """In the process that has a terminal, not in the workers of pytest-xdist."""
    path = config.getoption(_COUNT_INTO)
    if path is not None:
        Path(path).write_text(json.dumps(asdict(count(terminalreporter.stats))))


def count(reports: dict[str, list[Any]]) -> Counts:
    """From pytest's reports by outcome."""

    def named(*outcomes: str) -> set[str]:
        return {report.nodeid for outcome in outcomes for report in reports.get(outcome, ())}

    failed = named("failed", "error")
    passed = named("passed", "xpassed") - failed
    return Counts(len(passed), len(failed), len(named("skipped", "xfailed") - failed - passed))


def run(arguments: Sequence[str]) -> Counts:
    """One run of pytest. One that ends badly without a failed test (no such file, a crash, Ctrl-C) counts as one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "counts.json")
        status = subprocess.call(
            [sys.executable, "-m", "pytest", "-p", "tools.run_tests", f"{_COUNT_INTO}={path}", *arguments]
        )
        counts = Counts(**json.loads(path.read_text())) if path.exists() else Counts()
    if status in _WELL or counts.failed:
        return counts
    print(f"pytest ended with status {status}")
    return counts + Counts(failed=1)


def runs(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Split where the next run begins."""
    return (list(group) for is_between, group in groupby(arguments, _NEXT_RUN.__eq__) if not is_between)


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for pytest, which ends with its own report
    total = sum(map(run, runs(arguments)), Counts())
    if not total.passed and not total.failed:
        print("no test ran")
    print(total, flush=True)
    return int(total.failed > 0 or not total.passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
