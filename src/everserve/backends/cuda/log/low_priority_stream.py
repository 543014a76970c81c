"""A stream beside the one that computes: what is queued there is done when the device has nothing better to do."""

from collections.abc import Callable
from typing import Protocol

import torch


class Side(Protocol):
    """Where a writer's kernels run. One at a time, in order."""

    device: torch.device

    def record(self, launch: Callable[[], None]) -> Callable[[], None]:
        """What queues these launches again, at little cost. They are run now, so that kernels are loaded."""

    def run(self, launch: Callable[[], None]) -> None:
        """Queue these launches."""

    def wait(self) -> None:
        """Until everything that was queued is done."""


class SideStream:
    """`Side` on a device, with the lowest priority."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device, priority=0)
        self._done = torch.cuda.Event()
        self._is_waiting = False

    def record(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.run(launch)
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            launch()
            graph.capture_end()
        self.run(graph.replay)  # the first time takes longer
        self.wait()
        return lambda: self.run(graph.replay)

    def run(self, launch: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            launch()
            self._done.record(self._stream)
        self._is_waiting = True

    def wait(self) -> None:
        if self._is_waiting:
            self._done.synchronize()
            self._is_waiting = False
