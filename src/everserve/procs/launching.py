"""How root starts the processes of an instance: an interpreter, its module, and sockets by descriptor.

Imports nothing but the standard library: the first process is started before anything else is imported
(procs/early_zygote.py).
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping

# NumPy starts these threads when it is imported. They are not used here, and a zygote with threads cannot fork safely.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
_MODULES = {
    "gateway": "everserve.gateway",
    "orchestrator": "everserve.control",
    "anchor": "everserve.memory.anchor",
    "carrier": "everserve.carrier",
    "zygote": "everserve.zygote",
}

Launch = Callable[[str, Mapping[str, int], Mapping[str, str]], int]


def launch(name: str, fds: Mapping[str, int], environment: Mapping[str, str]) -> int:
    """Start this process with these descriptors, each passed with its flag. Returns its pid, to wait for it."""
    arguments = [text for flag, fd in fds.items() for text in (flag, str(fd))]
    module = _MODULES[name.partition("-")[0]]  # a gateway besides the first has a number behind its name
    child = subprocess.Popen(
        [sys.executable, "-m", module, "--root-pid", str(os.getpid()), *arguments],
        pass_fds=list(fds.values()),
        stdin=subprocess.DEVNULL,
        env=environment,
        process_group=0,  # Ctrl-C reaches only root, and the supervisor then stops all processes in order
    )
    child.returncode = 0  # or the module would wait for it, some time after the object is gone
    return child.pid
