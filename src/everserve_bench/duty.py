"""Take a process's CPU away: by duty cycles of SIGSTOP and SIGCONT, by a CPU quota, or by busy neighbours."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from everserve.procs.process import state_of

_CGROUPS = Path("/sys/fs/cgroup")
_QUOTA_PERIOD_US = 40_000  # shorter than any detection time


class DutyCycle:
    """While this runs, the process is stopped for a share of each period."""

    def __init__(self, pid: int, period_s: float, stopped: float) -> None:
        self.num_seen_stopped = 0  # cycles in which the kernel said so
        self._pid = pid
        self._stop_s, self._run_s = period_s * stopped, period_s * (1 - stopped)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "DutyCycle":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        """Until told, or until the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            while not self._is_over.is_set():
                os.kill(self._pid, signal.SIGSTOP)
                until_s = time.monotonic() + self._stop_s
                self.num_seen_stopped += state_of(self._pid) == "T"
                time.sleep(max(0.0, until_s - time.monotonic()))
                os.kill(self._pid, signal.SIGCONT)
                time.sleep(self._run_s)


def why_no_quota() -> str | None:
    """Why CPU quotas cannot be used here; None if they can."""
    if not (_CGROUPS / "cgroup.controllers").is_file():
        return "there is no cgroup v2"
    if "cpu" not in (_CGROUPS / "cgroup.subtree_control").read_text().split():
        return "cgroups here have no cpu controller"
    return None if os.access(_CGROUPS, os.W_OK) else "cgroups cannot be written"


@contextlib.contextmanager
def quota(pid: int, share: float) -> Iterator[None]:
    """While this runs, the process gets at most this share of one core. Afterwards it is where it was before."""
    before = _CGROUPS / Path(f"/proc/{pid}/cgroup").read_text().strip().rsplit("::", 1)[1].lstrip("/")
    group = _CGROUPS / f"everserve-grey-{pid}"
    group.mkdir()
    try:
        (group / "cpu.max").write_text(f"{round(share * _QUOTA_PERIOD_US)} {_QUOTA_PERIOD_US}")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):  # it may have ended, or its old group may not take processes
            (before / "cgroup.procs").write_text(str(pid))
        with contextlib.suppress(OSError):
            group.rmdir()


@contextlib.contextmanager
def neighbours(number: int) -> Iterator[None]:
    """So many processes that only use CPU time, now and then for a while."""
    burners = [subprocess.Popen([sys.executable, "-c", _BURN, str(i)]) for i in range(number)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
        for burner in burners:
            burner.wait()


_BURN = """
import random, sys, time
chance = random.Random(sys.argv[1])
while True:
    until = time.monotonic() + chance.uniform(0.5, 8)
    while time.monotonic() < until: pass
    time.sleep(chance.uniform(0, 4))
"""
