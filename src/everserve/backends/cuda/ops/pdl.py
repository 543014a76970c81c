"""Kernels that are launched early.

Between two kernels of a stream the device pauses: what the first one wrote is made visible, then the next one is
brought to the multiprocessors. That takes a microsecond or two, a dozen times in every layer. A kernel that is launched
*early* is brought there as soon as all programs of the one before have left, and waits for the rest where it is.

It could come sooner still, while they work, if they asked for it (`gdc_launch_dependents`). No kernel does: programs
that come one by one, wherever there is room, lie unevenly on the multiprocessors, and the persistent ones, with equal
shares, then take up to a quarter longer.

A kernel that is launched with `**early(device)` begins with `is_stopped`: before that it must not touch anything. That
is for kernels that follow a kernel; what follows a wait for another process (backends/cuda/lanes) is launched as usual.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from everserve.backends.cuda.ops.timeline import KERNEL_NOTE, note

_SINCE = (9, 0)  # the first devices that can do it


def early(device: torch.device) -> dict[str, Any]:
    """Arguments for a kernel's launch that may begin early."""
    if device.type != "cuda" or _capability(device) < _SINCE:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@triton.jit
def await_before(EARLY: tl.constexpr):
    """Before a kernel looks at anything: wait until all is done that was launched before it."""
    if EARLY:
        gdc_wait()


@triton.jit
def is_stopped(stop, EARLY: tl.constexpr):
    """Whether the step is stopped, when all that was launched before this kernel is done."""
    await_before(EARLY)
    note(stop, KERNEL_NOTE)
    return tl.load(stop) != 0
