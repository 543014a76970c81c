"""`everserve upgrade`: the instance goes on with another installed version, and streams do not notice. Here that is the
same version by another name, or something that says it is one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import cluster as c
from tests.support.cluster import DECODE

HELPERS = ("root", "supervisor", "orchestrator", "anchor", "zygote")
FLAGS = ("--attention-workers", "2", "--expert-workers", "2", "--enable-chaos", *c.PATIENT)


def pids(server) -> dict[str, int]:
    return {one["name"]: one["pid"] for one in c.cluster(server)["processes"]}


def upgrade(server, python: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "everserve.cli", "upgrade", "--to", str(python), "--url", server.url]
    return subprocess.run([*command, "--wait", "240"], capture_output=True, text=True, check=False, timeout=600)


def executable(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def python(tmp_path) -> Path:
    """This interpreter by another name."""
    path = os.pathsep.join(filter(None, sys.path))
    return executable(tmp_path / "python", f'export PYTHONPATH="{path}"\nexec -a "$0" {sys.executable} "$@"')


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo No module named everserve >&2; exit 1", "No module named everserve"),
        ("echo '" + json.dumps({"version": "9", "messages": "other"}) + "'", "version 9 cannot run beside"),
        ("echo hello", "not an answer: hello"),
    ],
)
def test_what_does_not_fit_changes_nothing(whole, tmp_path, script, reason):
    before = pids(whole)
    done = upgrade(whole, executable(tmp_path / "python", script))
    assert done.returncode == 2 and reason in done.stderr, done.stderr
    assert pids(whole) == before


def test_what_others_could_change_is_not_run(whole, tmp_path):
    before, shared = pids(whole), tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    done = upgrade(whole, executable(shared / "python", f"touch {tmp_path}/was-run"))
    assert done.returncode == 2 and f"{shared}: the path must be" in done.stderr, done.stderr
    assert pids(whole) == before and not (tmp_path / "was-run").exists()


def test_streams_go_on_while_everything_but_root_is_replaced(whole, expected, python):
    before, workers = pids(whole), {one["rank"]: one["incarnation"] for one in c.cluster(whole)["workers"]}

    def act() -> None:
        done = upgrade(whole, python)
        assert done.returncode == 0, done.stderr

    c.under_load(whole, DECODE, expected, act)
    c.wait_whole(whole)
    after = pids(whole)
    assert {name for name in after if after[name] == before[name]} == {"root"}
    assert all(one["incarnation"] > workers[one["rank"]] for one in c.cluster(whole)["workers"])
    for name in ("zygote", "keeper"):
        assert Path(f"/proc/{after[name]}/cmdline").read_text().split("\0")[0] == str(python)
    old = after["supervisor"]
    os.kill(old, signal.SIGKILL)
    c.wait_until(lambda: pids(whole).get("supervisor") not in (None, old), what="another supervisor")
    c.wait_whole(whole)


def test_a_version_that_cannot_start_its_processes_gives_way(whole, expected, python):
    """It says that it fits, and takes over; then its zygote ends at once."""
    before = pids(whole)
    python.write_text(python.read_text().replace("export", 'case "$*" in *everserve.zygote*) exit 3;; esac\nexport', 1))

    def act() -> None:
        done = upgrade(whole, python)
        assert done.returncode == 2 and "could not take over" in done.stderr, done.stderr

    c.under_load(whole, DECODE, expected, act)
    c.wait_whole(whole)
    after = pids(whole)
    assert {after[name] for name in ("root", "gateway")} == {before[name] for name in ("root", "gateway")}
    assert Path(f"/proc/{after['zygote']}/cmdline").read_text().split("\0")[0] != str(python)
