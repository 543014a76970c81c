"""What the zygote imports, in a process of its own: what is left out, what is there, and that it can fork."""

import json
import os
import subprocess
import sys

import pytest

from everserve.procs.launching import ENVIRONMENT

_PROGRAM = """
import gc, json, pkgutil, sys, threading, time
from everserve.wire.channel import Channel
from everserve.wire.messages import Ready, StartZygote
from everserve.zygote import __main__ as zygote, imports

imports.has_gpu = lambda: True
supervisor, control = (Channel(end) for end in Channel.pair())
supervisor.send(StartZygote(device="cuda", environment={"FOR_WORKERS": "1"}, num_spares=0), fds=[2])
zygote._prepare(control)
assert supervisor.receive(timeout_s=0) == Ready()

import everserve.backends.cpu, everserve.backends.cuda, everserve.engine, everserve.model, everserve.seam
import everserve.worker
rooms = (everserve.worker, everserve.engine, everserve.model, everserve.seam, everserve.backends.cpu,
         everserve.backends.cuda)
modules = [one.name for room in rooms for one in pkgutil.walk_packages(room.__path__, room.__name__ + ".")]
later = [name for name in modules if name not in sys.modules and not name.endswith(".__main__")]

ending = threading.Thread(target=time.sleep, args=(0.05,))
ending.start()  # as one that was joined, but still ends

import os
import torch
from triton.runtime.cache import triton_key
from everserve.backends.cuda.ops import attention, rows

found = {
    "absent": [name for name in ("torch._meta_registrations", "torch._decomp", "torch._refs") if name in sys.modules],
    "later": later,
    "environment": os.environ["FOR_WORKERS"],
    "threads": imports.num_threads(),
    "is_collecting": gc.isenabled(),
    "num_frozen": gc.get_freeze_count(),
    "is_initialised": torch.cuda.is_initialized(),
    "num_hashes": triton_key.cache_info().currsize,
    "kernels": [bool(attention._attend.hash), bool(rows._norm.hash)],
    "softmax": torch.softmax(torch.tensor([0.0, 0.0]), 0).tolist(),
}
import torch._meta_registrations
found["meta"] = list((torch.empty(2, 3, device="meta") @ torch.empty(3, 4, device="meta")).shape)
print(json.dumps(found))
"""


def test_everything_is_there_once_and_nothing_stands_against_a_fork():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | ENVIRONMENT
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("num_frozen") > 100_000, "all that was imported"
    assert found == {
        "absent": [],  # what describes functions to compilers was not imported ...
        "later": ["everserve.model.bundled"],  # for commands; who takes a dead worker's seat has no time to import
        "environment": "1",
        "threads": 1,
        "is_collecting": True,
        "is_initialised": False,
        "num_hashes": 1,
        "kernels": [True, True],
        "softmax": [0.5, 0.5],
        "meta": [2, 4],  # ... and can be, later
    }
