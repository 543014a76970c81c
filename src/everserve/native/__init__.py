"""C beside Python.

    libraries.py    which libraries there are, and the path of each: one that came with the package, or compiled here
    levels.py       the instruction sets that libraries of wheels are compiled for, and the best that this CPU has
    compiling.py    a directory of *.c becomes a library, kept in the user's cache

A wheel brings every library for every level (setup.py puts them into `prebuilt/`) and needs no compiler: the best level
that the CPU has is chosen when a library is loaded. A source checkout has none of them: there the system's compiler
makes libraries for this very machine, when they are first used. All levels of an architecture compute the same bits
(backends/cpu/csrc/ops/simd.h), and so does what is compiled here. So a wheel never compiles, even where there is a
compiler: it would gain nothing but another variant of what was tested.

EVERSERVE_CPU_LEVEL overrules the choice: a level's name, or `native` for compiling even if the package has libraries.

Only the standard library is imported: processes without torch use this too.
"""

from everserve.native.compiling import BuildError
from everserve.native.libraries import best_level, library

__all__ = ["BuildError", "best_level", "library"]
