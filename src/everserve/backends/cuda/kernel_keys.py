"""What Triton computes before it finds a compiled kernel in its cache, computed once, in the zygote.

A kernel is found by a hash of its source, of everything that it calls, of the compiler's version, and of all of Triton:
whose library has hundreds of megabytes. Triton keeps the parts as long as the process lives, so workers that are forked
later have them. Nothing here needs a device, or torch.
"""

import contextlib
import importlib
import sys
from threading import Thread

import triton
from triton.backends.nvidia.driver import CudaUtils
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

_KERNELS = "everserve.backends.cuda"


def begin() -> Thread:
    """What takes longest, beside imports: it holds the interpreter's lock for a small part of its time."""
    thread = Thread(target=triton_key, name="triton-key")
    thread.start()
    return thread


def complete() -> None:
    """The rest: our kernels, and what Triton asks the system for."""
    triton_key()
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_KERNELS)]
    for value in [value for module in modules for value in vars(module).values()]:
        if isinstance(value, JITFunction):
            _ = value.cache_key
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.experimental.gluon")  # Triton does, with the first launch
    with contextlib.suppress(RuntimeError):  # it cannot be found; that is for the first kernel to say
        _ = triton.knobs.nvidia.ptxas
    with contextlib.suppress(Exception):  # likewise: it may have to be compiled
        CudaUtils()
