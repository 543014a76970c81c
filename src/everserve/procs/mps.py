"""NVIDIA's MPS daemon, through which the processes of an instance compute on one device at the same time.

    supervisor ──lifeline (a pipe)──> watcher ── starts and ends ──> nvidia-cuda-mps-control ──> nvidia-cuda-mps-server

The daemon would outlive the instance, and must run before any process of the instance uses the device and until none
does. So a *watcher* owns it: a separate process that only waits for the end of its lifeline, which comes when the
supervisor closes it or dies in any way. The watcher adopts the daemon and its servers (they detach themselves from
their parent), so it can find, end and reap them. The watcher itself becomes root's child; the process table names it,
because the supervisor takes every process that it does not know for a stray worker.

Each instance has a daemon of its own, in a directory of its own. A daemon that runs already (it answers at
CUDA_MPS_PIPE_DIRECTORY) is used and never stopped.
"""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from everserve.errors import ConfigError
from everserve.procs import process

_CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_START_S = 20.0
_ANSWER_S = 5.0
_QUIT_S = 5.0  # the daemon waits for its servers, and these for processes that are just being killed
_KILL_S = 5.0  # then the rest is killed; a process inside the driver may die slowly


class Mps:
    """A daemon that answers: of this instance, or an existing one."""

    def __init__(
        self, environment: dict[str, str], lifeline: int | None = None, report: int | None = None, watcher: int = 0
    ) -> None:
        self.environment = environment  # for every process that uses the device through the daemon
        self.watcher = watcher  # its pid
        self.lifeline = lifeline
        self.report = report

    @classmethod
    def start(cls) -> "Mps":
        """Raises ConfigError with the reason in one line. Call it without threads."""
        if os.environ.get(_PIPES) and _answers(os.environ):
            return cls({})
        if shutil.which(_CONTROL) is None:
            raise ConfigError(
                f"workers that share a device need NVIDIA's MPS, and {_CONTROL} is not in PATH: install it (it comes"
                " with the driver), start no more workers than there are devices, or use --device cpu"
            )
        directory = tempfile.mkdtemp(prefix="everserve-mps-")
        lifeline_end, lifeline = os.pipe()
        report, report_end = os.pipe()
        command = [sys.executable, "-m", "everserve.procs.mps", directory]
        subprocess.run(command, stdin=lifeline_end, stdout=report_end, start_new_session=True, check=False)
        os.close(lifeline_end)
        os.close(report_end)
        daemon = cls(environment_of(Path(directory)), lifeline, report)
        said = _read_line(report, _START_S + _ANSWER_S)
        is_ok, _, watcher = said.partition(" pid ")
        if is_ok != "ok":
            daemon.stop()
            raise ConfigError(f"{_CONTROL} could not be started: {said or 'it does not answer'}")
        daemon.watcher = int(watcher)
        return daemon

    def stop(self) -> None:
        """End the instance's own daemon within a bounded time. All processes that used it must have ended before."""
        if self.lifeline is None or self.report is None:
            return
        os.close(self.lifeline)
        while _read_line(self.report, _QUIT_S + _ANSWER_S + _KILL_S):
            pass  # until end of file
        os.close(self.report)
        self.lifeline = self.report = None


def environment_of(directory: Path) -> dict[str, str]:
    """The variables that the daemon and its clients must share."""
    return {_PIPES: str(directory / "pipes"), _LOGS: str(directory / "logs")}


def _answers(environment: Mapping[str, str]) -> bool:
    return _ask("get_server_list", environment, _ANSWER_S)


def _ask(question: str, environment: Mapping[str, str], timeout_s: float) -> bool:
    """Whether the daemon accepted this command."""
    try:
        done = subprocess.run(
            [_CONTROL],
            input=f"{question}\n".encode(),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _read_line(fd: int, timeout_s: float) -> str:
    """The next line; empty at end of file or on timeout."""
    deadline = time.monotonic() + timeout_s
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                break
            byte = os.read(fd, 1)
            if not byte:
                break
            line += byte
    return line.decode(errors="replace").strip()


# -- the watcher ---------------------------------------------------------------------------------


def watch(directory: Path) -> None:
    """Start the daemon, report on stdout, wait for the end of the lifeline (stdin), end the daemon."""
    process.adopt_orphans()
    process.set_name("es-mps")
    environment = os.environ | environment_of(directory)
    for name in environment_of(directory).values():
        Path(name).mkdir()
    failure = _start_daemon(directory, environment)
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # only the end of the lifeline ends the watcher
    os.write(sys.stdout.fileno(), f"{failure or f'ok pid {os.getpid()}'}\n".encode())
    if not failure:
        while os.read(sys.stdin.fileno(), 1):
            pass
        _ask("quit", environment, _QUIT_S)
        _wait_for_children(_QUIT_S)
    _kill_children(_KILL_S)
    shutil.rmtree(directory, ignore_errors=True)


def _start_daemon(directory: Path, environment: Mapping[str, str]) -> str:
    """Why the start failed; empty if it did not."""
    messages = directory / "start-output"
    try:
        with messages.open("wb") as output:  # not a pipe: the daemon would keep it open
            done = subprocess.run(
                [_CONTROL, "-d"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=_START_S,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        lines = messages.read_text(errors="replace").split("\n")
        return " ".join(line.strip() for line in lines).strip() or f"exit status {done.returncode}"
    deadline = time.monotonic() + _ANSWER_S
    while not _answers(environment):
        if time.monotonic() > deadline:
            return "it does not answer"
        time.sleep(0.05)
    return ""


def _wait_for_children(timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while _reap() and time.monotonic() < deadline:
        time.sleep(0.02)


def _kill_children(timeout_s: float) -> None:
    """Repeat until there are none: children of a killed process become children of the watcher."""
    deadline = time.monotonic() + timeout_s
    while (children := _reap()) and time.monotonic() < deadline:
        for pid in children:
            process.kill(pid)
        time.sleep(0.02)


def _reap() -> list[int]:
    """Reap; returns the children that still exist."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return process.children_of(os.getpid())


def main() -> int:
    """Fork the watcher and exit: the supervisor, which waits for this process, must not be its parent, or it would hear
    of the watcher's end instead of root."""
    if os.fork() == 0:
        watch(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
