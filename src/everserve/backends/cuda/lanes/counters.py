"""What the kernels of an expert worker count, as the host sees it: a recent copy, for which no stream waits."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class CounterCopy:
    """A copy of a table of int64 on the device, at most two calls old. A copy takes longer than a call, so each call
    begins the one that the next call returns."""

    def __init__(self, counters: Tensor) -> None:
        self._counters = counters
        self._stream = torch.cuda.Stream(counters.device)
        self._arriving = torch.zeros(counters.shape, dtype=torch.int64, pin_memory=True)
        self._is_here = torch.cuda.Event()
        self._latest: NDArray[np.int64] = self._arriving.numpy().copy()
        self._begin()

    def latest(self) -> NDArray[np.int64]:
        if self._is_here.query():
            self._latest = self._arriving.numpy().copy()
            self._begin()
        return self._latest

    def _begin(self) -> None:
        with torch.cuda.stream(self._stream):
            self._arriving.copy_(self._counters, non_blocking=True)
            self._is_here.record()
