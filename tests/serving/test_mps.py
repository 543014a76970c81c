"""The MPS daemon's life, with a daemon that is none: what is started, with which environment, and that it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everserve.errors import ConfigError
from everserve.procs import process
from everserve.procs.mps import Mps, environment_of
from tests.support.cluster import is_alive, wait_until

# As the real one: detaches itself with -d, has a server below itself, and takes commands from its input otherwise.
DAEMON = f"""#!{sys.executable}
import os, signal, subprocess, sys
from pathlib import Path
directory = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
mode = os.environ.get("TOY_MPS", "")
with open(os.environ["TOY_MPS_LOG"], "a") as log:
    print(*sys.argv[1:], *([] if "-d" in sys.argv else [sys.stdin.read().strip()]), file=log)
    sys.stdin = open(os.devnull)
if "-d" in sys.argv:
    if mode == "refuse":
        sys.exit("An instance of this daemon is already running")
    if os.fork() == 0:
        os.setsid()
        server = subprocess.Popen(["sleep", "1000"])
        (directory / "pids").write_text(f"{{os.getpid()}} {{server.pid}}")
        if mode == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, lambda *_: (server.kill(), server.wait(), os._exit(0)))
        (directory / "is-up").touch()
        while True:
            signal.pause()
elif not (directory / "is-up").exists():
    sys.exit(1)
elif "quit" in Path(os.environ["TOY_MPS_LOG"]).read_text():
    os.kill(int((directory / "pids").read_text().split()[0]), signal.SIGTERM)
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Puts the toy daemon first in PATH; returns what it was asked so far."""
    binary = tmp_path / "bin" / "nvidia-cuda-mps-control"
    binary.parent.mkdir()
    binary.write_text(DAEMON)
    binary.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TOY_MPS_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return lambda: (tmp_path / "log").read_text().splitlines()


def pids(mps: Mps) -> list[int]:
    """Of the daemon, its server, and the watcher, which is the daemon's parent."""
    daemon, server = map(int, (Path(mps.environment["CUDA_MPS_PIPE_DIRECTORY"]) / "pids").read_text().split())
    parent = int(Path(f"/proc/{daemon}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return [daemon, server, parent]


def wait_gone(everybody: list[int]) -> None:
    wait_until(lambda: not any(is_alive(pid) for pid in everybody), what="the end of everybody")


def test_environment():
    environment = environment_of(Path("/tmp/x"))
    assert environment == {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/x/pipes", "CUDA_MPS_LOG_DIRECTORY": "/tmp/x/logs"}


def test_ours_is_started_and_stopped_and_leaves_nothing(toy, tmp_path):
    mps = Mps.start()
    everybody = pids(mps)
    assert all(is_alive(pid) for pid in everybody)
    assert not set(everybody) & set(process.children_of(os.getpid())), "no child that a supervisor would not know"
    assert toy()[0] == "-d" and toy()[-1] == "get_server_list"
    mps.stop()
    assert toy()[-1] == "quit"
    wait_gone(everybody)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_two_instances_have_daemons_of_their_own(toy):
    one, other = Mps.start(), Mps.start()
    assert one.environment.keys() == other.environment.keys()
    assert not set(one.environment.values()) & set(other.environment.values())
    survivors = pids(other)
    one.stop()
    assert all(is_alive(pid) for pid in survivors)
    other.stop()
    wait_gone(survivors)


def test_what_does_not_quit_is_killed(toy, monkeypatch):
    monkeypatch.setenv("TOY_MPS", "stubborn")
    mps = Mps.start()
    everybody = pids(mps)
    mps.stop()
    wait_gone(everybody)


def test_it_ends_with_a_supervisor_that_is_killed(toy, tmp_path):
    code = (
        "import time; from everserve.procs.mps import Mps;"
        "print(Mps.start().environment['CUDA_MPS_PIPE_DIRECTORY'], flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        mps = Mps({"CUDA_MPS_PIPE_DIRECTORY": supervisor.stdout.readline().strip()})
        everybody = pids(mps)
        assert all(is_alive(pid) for pid in everybody)
        supervisor.send_signal(signal.SIGKILL)
    wait_gone(everybody)
    wait_until(lambda: list((tmp_path / "tmp").iterdir()) == [], what="the end of its directory")


def test_one_that_is_there_is_used_and_never_stopped(toy, monkeypatch):
    theirs = Mps.start()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", theirs.environment["CUDA_MPS_PIPE_DIRECTORY"])
    used = Mps.start()
    assert used.environment == {}, "children inherit what says where it is"
    used.stop()
    assert "quit" not in toy() and all(is_alive(pid) for pid in pids(theirs))
    theirs.stop()


def test_one_that_does_not_answer_is_not_used(toy, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    mps = Mps.start()
    assert mps.environment["CUDA_MPS_PIPE_DIRECTORY"] != str(tmp_path)
    mps.stop()


def test_a_daemon_that_refuses_is_one_clear_line(toy, monkeypatch, tmp_path):
    monkeypatch.setenv("TOY_MPS", "refuse")
    with pytest.raises(ConfigError, match=r"could not be started: An instance of this daemon is already running$"):
        Mps.start()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_without_the_binary_it_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"nvidia-cuda-mps-control is not in PATH: .*--device cpu"):
        Mps.start()
