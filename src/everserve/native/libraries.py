"""Which libraries there are, and where they are."""

import os
from pathlib import Path

from everserve.native import levels
from everserve.native.compiling import NATIVE_FLAGS, BuildError, Library, compiled
from everserve.native.levels import Level

_PACKAGE = Path(__file__).parents[1]
PREBUILT = Path("native/prebuilt")  # <level>/<name>.so; in wheels only
_NATIVE = Level("native", NATIVE_FLAGS)
_CHOICE = "EVERSERVE_CPU_LEVEL"
_SOURCES = {
    "cpu": ["native/csrc"],
    "kvlog": ["kvlog/csrc"],
    "ledger": ["ledger/csrc"],
    "liveness": ["memory/liveness/csrc"],
    "pieces": ["memory/pieces/csrc", "kvlog/csrc"],
    "weights": ["memory/weights/csrc"],
    "ops": ["backends/cpu/csrc/ops"],
    "lanes": ["backends/cpu/csrc/lanes", "backends/cpu/csrc/ops", "memory/liveness/csrc"],
    "device_wait": ["backends/cuda/csrc", "memory/liveness/csrc"],
}
LIBRARIES = {
    name: Library(name, _PACKAGE / sources, tuple(_PACKAGE / directory for directory in headers))
    for name, (sources, *headers) in _SOURCES.items()
}


def library(name: str) -> Path:
    """The path of one of LIBRARIES that this machine can load; it is compiled if the package did not bring it."""
    return _at(name, _chosen_level())


def best_level() -> Level:
    """The best level that this CPU has."""
    return levels.usable(library("cpu"))[0]


def _chosen_level() -> Level:
    """The level of every library of this process."""
    all_levels = levels.of_this_machine()
    wanted = os.environ.get(_CHOICE, "")
    if wanted == _NATIVE.name or not (wanted or _prebuilt(all_levels[-1]).exists()):
        return _NATIVE
    usable = levels.usable(_at("cpu", all_levels[-1]))
    if not wanted:
        return usable[0]
    for level in usable:
        if level.name == wanted:
            return level
    names = ", ".join(level.name for level in (*usable, _NATIVE))
    raise BuildError(f"{_CHOICE}={wanted}: this CPU has {names}")


def _at(name: str, level: Level) -> Path:
    prebuilt = _prebuilt(level) / f"{name}.so"
    return prebuilt if prebuilt.exists() else compiled(LIBRARIES[name], level.flags)


def _prebuilt(level: Level) -> Path:
    return _PACKAGE / PREBUILT / level.name
