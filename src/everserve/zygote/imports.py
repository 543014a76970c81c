"""What workers need, imported as fast as possible: this is the longest part of a start.

no collections     millions of objects are made, and all of them stay
nothing to trace   a third of torch's own imports describes its functions to compilers that trace programs. Workers
                   have none. Who imports these modules later gets them
at the same time   Triton's hash of itself, beside torch's imports
"""

import gc
import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import ModuleType

_THREADS_END_S = 1.0
_FOR_TRACING = ("torch._meta_registrations", "torch.distributed._meta_registrations")


@contextmanager
def no_collections() -> Iterator[None]:
    """Afterwards, objects that exist are never looked at: their pages stay shared between all workers. What could be
    collected of them is little; and it would leave holes in these pages."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@contextmanager
def nothing_to_trace() -> Iterator[None]:
    """torch, if it is imported here first, goes without modules that only compilers need."""
    absent = [ModuleType(name) for name in _FOR_TRACING if name not in sys.modules and "torch" not in sys.modules]
    sys.modules.update({module.__name__: module for module in absent})
    try:
        yield
    finally:
        for module in absent:
            del sys.modules[module.__name__]
            package, _, name = module.__name__.rpartition(".")
            if getattr(sys.modules.get(package), name, None) is module:
                delattr(sys.modules[package], name)


def num_threads() -> int:
    """The number of threads of this process, when those that were joined have ended for the kernel too: that may be a
    moment later.
    """
    tasks, deadline = Path("/proc/self/task"), time.monotonic() + _THREADS_END_S
    while tasks.exists() and len(list(tasks.iterdir())) > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def has_gpu() -> bool:
    """Whether files say so. The driver's library must not be loaded yet: the environment may not be complete."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def hash_triton() -> Thread | None:
    """If workers may compute on a GPU. The thread has to be waited for before a fork."""
    if not has_gpu() or importlib.util.find_spec("triton") is None:
        return None
    from everserve.backends.cuda import kernel_keys  # noqa: PLC0415 (Triton is not there on every machine)

    return kernel_keys.begin()
