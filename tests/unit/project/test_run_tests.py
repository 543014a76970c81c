"""What `make test` says at the end: one line about several runs, and a status that agrees with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = {
    "passing": "def test_one(): pass\ndef test_two(): pass\n",
    "skipped": "import pytest\npytest.skip('not here', allow_module_level=True)\n",
    "failing": "def test_it(): assert False\n",
    "unclean": """
import pytest
@pytest.fixture
def thing():
    yield
    raise OSError
def test_that_passes_first(thing): pass
""",
    "broken": "import nothing_of_that_name\n",
    "empty": "",
}


def summary(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """The status and what it prints, for runs over our own files: `arguments` are their names."""
    for name, text in FILES.items():
        (folder / f"test_{name}.py").write_text(text)
    ours = ["-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]  # not this repository's configuration
    words = {"--then": ["--then", *ours]} | {name: [str(folder / f"test_{name}.py")] for name in FILES}
    command = [sys.executable, "-m", "tools.run_tests", *ours]
    command += [word for argument in arguments for word in words.get(argument, [argument])]
    quick = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # importing plugins takes most of the time
    done = subprocess.run(command, cwd=ROOT, env=quick, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["passing", "--then", "skipped"], 0, "2 passed, 0 failed, 1 skipped"),
        (["failing", "unclean", "passing", "-p", "xdist.plugin", "-n", "1"], 1, "2 passed, 2 failed, 0 skipped"),
        (["broken", "--then", "passing", "--then", "no_such_file.py"], 1, "2 passed, 2 failed, 0 skipped"),
        (["skipped", "--then", "empty"], 1, "0 passed, 0 failed, 1 skipped"),
    ],
)
def test_last_line_counts_all_runs(tmp_path: Path, arguments: list[str], status: int, line: str) -> None:
    got, lines = summary(tmp_path, *arguments)
    assert (got, lines[-1]) == (status, line), "\n".join(lines)
