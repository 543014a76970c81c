"""Spares rehearse with weights that are not there (backends/cuda/rehearsal.py): no kernel of a stopped step looks."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("stop", "status"), [(1, 0), (0, -signal.SIGSEGV)], ids=["stopped", "running: the trap works"])
def test_a_stopped_step_touches_neither_weights_nor_kv(stop, status):
    command = [sys.executable, "-m", "tests.kernels.untouchable", str(stop)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
