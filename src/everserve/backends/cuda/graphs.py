"""JoinedGraph: graphs that were captured one by one, launched as one.

Between two launches the device pauses for some microseconds, between two nodes of a graph hardly at all.
"""

import contextlib
import ctypes
from collections.abc import Sequence

from everserve.memory.device import load


class JoinedGraph:
    """These graphs (their CUgraph handles), each after the one before. What they refer to must stay as long as this."""

    def __init__(self, graphs: Sequence[int]) -> None:
        self._library = load()
        self._executable = ctypes.c_void_p()
        joined, before = ctypes.c_void_p(), ctypes.c_void_p()
        self._library.call("cuGraphCreate", ctypes.byref(joined), 0)
        try:
            for i, graph in enumerate(graphs):
                node = ctypes.c_void_p()
                self._library.call(
                    "cuGraphAddChildGraphNode",
                    ctypes.byref(node), joined, ctypes.byref(before), int(i > 0), graph,
                )  # fmt: skip
                before = node
            self._library.call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), joined, 0)
        finally:
            self._library.call("cuGraphDestroy", joined)

    def launch(self, stream: int) -> None:
        self._library.call("cuGraphLaunch", self._executable, stream)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the process there may be nothing left to free it from
            if self._executable:
                self._library.status("cuGraphExecDestroy", self._executable)
