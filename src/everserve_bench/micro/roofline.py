"""What one step on a CPU cannot be faster than: reading its bytes once, and its arithmetic.

Both limits are measured in the same run, on all cores: reading a buffer far larger than the caches, and a product in
the caches with the kernels that the server uses. A step that overlaps the two perfectly takes as long as the longer
one.
"""

import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from everserve_bench.shapes import bytes_per_step, flops_per_step

_PRODUCTS = ((96, 64, 512), (192, 128, 512), (192, 256, 512))  # rows, columns and terms: all of it is in the caches


@dataclass(frozen=True)
class Floor:
    """Seconds that a step takes at least."""

    memory_s: float
    arithmetic_s: float | None  # None: the server would not use kernels of ours on this machine

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.arithmetic_s or 0.0)

    @property
    def limit(self) -> str:
        """The one that is reached first."""
        return "memory" if self.seconds == self.memory_s else "arithmetic"


@dataclass(frozen=True)
class Roofline:
    """What this machine can do, with all its cores."""

    bytes_per_s: float
    flops: float | None

    @classmethod
    def measure(cls) -> "Roofline":
        return cls(read_bandwidth(), product_flops())

    def floor(self, config: dict[str, Any], num_streams: int, context: int, itemsize: int) -> Floor:
        """The least time of a decode step of so many streams, each with so many tokens behind it."""
        arithmetic_s = flops_per_step(config, num_streams, context) / self.flops if self.flops else None
        return Floor(bytes_per_step(config, num_streams, context, itemsize) / self.bytes_per_s, arithmetic_s)


def read_bandwidth(num_bytes: int = 512 << 20, repeats: int = 5) -> float:
    """Bytes per second when all cores read a buffer far larger than the caches; the best of a few."""
    buffer = torch.ones(num_bytes // 4)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - start)
    return num_bytes / best


def product_flops(repeats: int = 200) -> float | None:
    """Operations per second of the kernels' products on all cores, with nothing to wait for; the best of many."""
    from everserve.backends.cpu import ops as native  # noqa: PLC0415 (compiles, if need be)

    if native.unavailable():
        return None
    ops = native.NativeOps(num_threads=len(os.sched_getaffinity(0)))
    best = 0.0
    for num_rows, num_columns, k in _PRODUCTS:
        x, weight = torch.ones(num_rows, k), torch.ones(num_columns, k)
        for _ in range(repeats):
            start = time.perf_counter()
            ops.linear(x, weight)
            best = max(best, 2 * num_rows * num_columns * k / (time.perf_counter() - start))
    return best
