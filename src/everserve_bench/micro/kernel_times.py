"""Where the time of a step goes on a GPU, kernel by kernel, as torch's profiler sees it."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

_MOST_KERNELS = 14  # of a table; the rest is summed up
_ARGUMENTS = re.compile(r"[<(].*")  # of a C++ name: what was it instantiated for


class KernelTime(NamedTuple):
    """All launches of one kernel in a step."""

    name: str
    num: int
    ms: float


def kernel_times(step: Callable[[], Any]) -> dict[str, Any]:
    """The times of one call's kernels. `step_ms`: the whole of it, as the host sees it, in another call without the
    profiler.
    """
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 (slow to import)

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    step_ms = (time.perf_counter() - began) * 1e3
    events = ((event.name, event.time_range.elapsed_us()) for event in profiled.events())
    return {"step_ms": step_ms, "kernels": [found._asdict() for found in summed_up(events)]}


def summed_up(events: Iterable[tuple[str, float]]) -> list[KernelTime]:
    """(name, microseconds) of each launch -> the kernels that took the longest, and all others as one."""
    lasted: dict[str, list[float]] = defaultdict(list)
    for name, us in events:
        lasted[_ARGUMENTS.sub("", name.removeprefix("void "))].append(us)
    found = sorted(
        (KernelTime(name, len(times), sum(times) / 1e3) for name, times in lasted.items()), key=lambda one: -one.ms
    )
    rest = found[_MOST_KERNELS:]
    if rest:
        found = [*found[:_MOST_KERNELS], KernelTime("others", sum(k.num for k in rest), sum(k.ms for k in rest))]
    return found
