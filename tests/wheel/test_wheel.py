"""A wheel holds everything, says truly where it runs, and serves without a compiler."""

import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everserve.native import best_level, levels
from everserve.native.libraries import LIBRARIES
from everserve.procs.local_server import LocalServer
from tests.support import cluster as c
from tests.support.shared_servers import CLUSTER
from tests.wheel.conftest import ROOT

TORCH_GLIBC = 28  # what torch's own wheels need: ours need nothing newer
PREBUILT = "everserve/native/prebuilt"


def test_it_holds_every_library_for_every_level_and_the_sources(wheel):
    expected = {f"{level.name}/{name}.so" for level in levels.of_this_machine() for name in LIBRARIES}
    assert {str(path.relative_to(wheel / PREBUILT)) for path in (wheel / PREBUILT).rglob("*.so")} == expected
    sources = ROOT / "src/everserve"
    for path in [*sources.rglob("*.[ch]"), *sources.rglob("*.py")]:
        assert (wheel / "everserve" / path.relative_to(sources)).read_bytes() == path.read_bytes()


def test_its_name_says_what_it_needs(wheel, wheel_file):
    """auditwheel would say the same: the newest symbol of glibc, by another reader than the one that chose the name."""
    tag = re.fullmatch(r"everserve-[\d.]+-py3-none-manylinux_2_(\d+)_(\w+)\.whl", wheel_file.name)
    assert tag is not None and tag[2] == platform.machine(), wheel_file.name
    symbols = subprocess.run(
        ["objdump", "-T", *(wheel / PREBUILT).rglob("*.so")], check=True, capture_output=True, text=True
    ).stdout
    versions = [int(version) for version in re.findall(r"GLIBC_2\.(\d+)", symbols)]
    assert int(tag[1]) == max(versions) <= TORCH_GLIBC


def test_without_a_compiler_there_is_none_and_a_line_says_so(source_copy, tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", tmp_path / "dist"]
    environment = {**os.environ, "CC": "no-such-compiler"}
    ended = subprocess.run(command, cwd=source_copy, env=environment, text=True, capture_output=True, check=False)
    line = "everserve: a wheel holds compiled libraries: cannot run no-such-compiler: No such file or directory"
    assert ended.returncode and ended.stderr.splitlines()[-1] == line and not (tmp_path / "dist").exists()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A cluster of what the wheel holds: with an empty cache, and no compiler."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(wheel),
        "CC": "/no/compiler",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }
    with c.unharmed(LocalServer("demo", *CLUSTER, environment=environment)) as server:
        yield server


def test_it_serves_without_a_compiler_and_survives_a_kill(installed, wheel):
    c.wait_whole(installed)
    expected = c.run_all(installed, c.DECODE)
    for rank in (0, 2):  # an attention worker, an expert worker
        fault = c.Fault(installed, rank, signal.SIGKILL)
        streams = c.run_with(installed, c.DECODE, c.in_decode, fault)
        fault.assert_landed()
        c.assert_equal(streams, expected)
    best = best_level().name
    for worker in c.cluster(installed)["workers"]:
        assert {path.parent for path in loaded(worker["pid"])} == {wheel / PREBUILT / best}
        assert {path.stem for path in loaded(worker["pid"])} >= {"ops", "lanes", "liveness"}


def loaded(pid: int) -> set[Path]:
    """Our libraries, wherever they are; without the one that says which level the CPU has."""
    files = {Path(line.split()[-1]) for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line}
    names = tuple(LIBRARIES.keys() - {"cpu"})
    return {path for path in files if path.suffix == ".so" and path.stem.startswith(names)}
