"""Waiting for a device, which cannot ring a doorbell (csrc/wait.c)."""

import ctypes
import functools
from typing import Any

from everserve.native import library


@functools.cache
def load() -> Any:
    """es_device_wait; compiled on first use. It gives up the interpreter's lock around a call."""
    pointer, int64, uint32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    function = ctypes.CDLL(str(library("device_wait"))).es_device_wait
    function.argtypes = [pointer, int64, pointer, uint32, pointer, uint32, int64, int64, int64]
    function.restype = int64
    return function
