"""Kernels that are launched early.

Between two kernels of a stream the device pauses: what the first one wrote is made visible, then the next one is
brought to the multiprocessors. That takes a microsecond or two, a dozen times in every layer. A kernel that is launched
*early* is brought there as soon as all programs of the one before have left, and waits for the rest where it is.

It could come sooner still, while they work, if they asked for it (`gdc_launch_dependents`). Kernels do not, except
`choose`, which is a single warp: programs that come one by one, wherever there is room, lie unevenly on the
multiprocessors, and the persistent ones, with equal shares, then take up to a quarter longer.

Every kernel of a step begins with `is_stopped`, and is launched with `**early(device)`.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

_SINCE = (9, 0)  # the first devices that can do it


def early(device: torch.device, after_kernel: bool = True) -> dict[str, Any]:
    """For a kernel's launch. Without `after_kernel` something else comes before it in its stream."""
    if device.type != "cuda" or _capability(device) < _SINCE:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": after_kernel}


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
    return tl.load(stop) != 0
