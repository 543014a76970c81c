"""The instruction sets that libraries of wheels are compiled for.

A level is some flags of the compiler. Every CPU of an architecture has its last level, and a CPU that has one level has
those after it. They differ in what the kernels make use of (backends/cpu/csrc/ops/simd.h), and in nothing else.
"""

import ctypes
import functools
import platform
from dataclasses import dataclass
from pathlib import Path

from everserve.native.compiling import BuildError


@dataclass(frozen=True)
class Level:
    name: str
    flags: tuple[str, ...] = ()
    is_slow: bool = False  # each multiply-add of the kernels is dozens of instructions


_AVX2 = ("-march=x86-64", "-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mpopcnt")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512cd", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_LEVELS = {
    "x86_64": (Level("avx512", _AVX512), Level("avx2", _AVX2), Level("sse2", ("-march=x86-64",), is_slow=True)),
    "aarch64": (Level("neon", ("-march=armv8-a",)),),
}


def of(machine: str) -> tuple[Level, ...]:
    """The best first. An architecture that is not known here has one, without flags."""
    return _LEVELS.get(machine, (Level("any"),))


def of_this_machine() -> tuple[Level, ...]:
    return of(platform.machine())


@functools.cache
def usable(cpu_library: Path) -> tuple[Level, ...]:
    """Those that this CPU has, and this kernel keeps the registers of. `cpu_library` is csrc/cpu.c, compiled."""
    try:
        num_above = ctypes.CDLL(str(cpu_library)).es_cpu_level()
    except OSError as e:
        raise BuildError(f"cannot load {cpu_library}: {e}") from e
    return of_this_machine()[num_above:]
