"""How the processes of an instance are started: an interpreter, its module, and sockets by descriptor.

Imports nothing but the standard library: the first process is started before anything else is imported
(procs/early_zygote.py).
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping

# NumPy starts these threads when it is imported. They are not used here, and a zygote with threads cannot fork safely.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
_MODULES = {
    "gateway": "everserve.gateway",
    "orchestrator": "everserve.control",
    "anchor": "everserve.memory.anchor",
    "zygote": "everserve.zygote",
}

Launch = Callable[[str, Mapping[str, socket.socket], Mapping[str, str]], "subprocess.Popen[bytes]"]


def launch(
    name: str, sockets: Mapping[str, socket.socket], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start this process with these sockets, each passed by descriptor with its flag."""
    arguments = [text for flag, sock in sockets.items() for text in (flag, str(sock.fileno()))]
    return subprocess.Popen(
        [sys.executable, "-m", _MODULES[name], "--supervisor-pid", str(os.getpid()), *arguments],
        pass_fds=[sock.fileno() for sock in sockets.values()],
        stdin=subprocess.DEVNULL,
        env=environment,
        process_group=0,  # Ctrl-C reaches only the supervisor, which then stops all processes in order
    )
