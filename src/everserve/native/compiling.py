"""Compile a directory of *.c, once, with the system's compiler.

CC and CFLAGS mean what they mean to make. A library for this machine is kept in the user's cache under two keys, which
are everything that it depends on: sources, flags and CPU; and the compiler:

    $XDG_CACHE_HOME/everserve/<name>-<key>-<compiler>.so       (~/.cache where XDG_CACHE_HOME is not set)

Without a compiler the newest library with the first key serves: a machine whose cache is filled needs none.

Several processes may build at once: each compiles in a directory of its own and renames the result into place.
"""

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from everserve import user_cache

# For this very machine.
NATIVE_FLAGS = ("-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native",)
# Contraction is off: where a multiply-add is fused is part of the kernels' definition (backends/cpu/csrc/ops/simd.h).
_FLAGS = (
    "-O3",
    "-std=c11",
    "-fPIC",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # vectors that are wider than the registers are passed inside a library only
)


class BuildError(RuntimeError):
    """A library cannot be built here. The message is one line that says why."""


@dataclass(frozen=True)
class Library:
    """All *.c of `sources`; `headers` are other directories to include from."""

    name: str
    sources: Path
    headers: tuple[Path, ...] = ()


def compiled(library: Library, flags: Sequence[str] = NATIVE_FLAGS) -> Path:
    """Its path in the cache; compiles it if this machine has not done so before."""
    cache, key = _cache_dir(), _key(library, flags)
    try:
        compiler = find_compiler()
    except BuildError:
        built = sorted(cache.glob(f"{library.name}-{key}-*.so"), key=lambda path: path.stat().st_mtime_ns)
        if not built:
            raise
        return built[-1]
    path = cache / f"{library.name}-{key}-{_digest(_version(*compiler))}.so"
    if not path.exists():
        build(compiler, library, flags, path)
    return path


def find_compiler() -> list[str]:
    """One that CC names is taken at its word."""
    if "CC" in os.environ:
        return shlex.split(os.environ["CC"])
    found = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if found is None:
        raise BuildError("no C compiler found (cc, gcc or clang; set CC to use another)")
    return [found]


def machine_of(compiler: list[str]) -> str:
    """The one that it makes code for, as uname calls it."""
    return _run([*compiler, "-dumpmachine"]).split("-")[0]


def _cache_dir() -> Path:
    try:
        return user_cache.directory()
    except user_cache.CacheError as error:
        raise BuildError(str(error)) from error


def _key(library: Library, flags: Sequence[str]) -> str:
    files = [*sorted(library.sources.iterdir()), *(file for d in library.headers for file in sorted(d.glob("*.h")))]
    contents = (file.name.encode() + file.read_bytes() for file in files)
    return _digest(*contents, " ".join(_all_flags(flags)), _cpu())


def _all_flags(flags: Sequence[str]) -> list[str]:
    return [*_FLAGS, *flags, *shlex.split(os.environ.get("CFLAGS", ""))]


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return digest.hexdigest()[:20]


@functools.cache  # a process loads several libraries
def _version(*compiler: str) -> str:
    return _run([*compiler, "--version"])


def _cpu() -> str:
    """What -march=native looks at. A home directory may be shared by machines that differ."""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU variant", "CPU part")
    try:
        first_cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first_cpu.splitlines() if line.startswith(names))


def build(compiler: list[str], library: Library, flags: Sequence[str], path: Path) -> None:
    """The library, at this path."""
    all_flags = _all_flags(flags)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as name:
        directory, files = Path(name), sorted(library.sources.glob("*.c"))
        objects = [str(directory / f"{file.stem}.o") for file in files]
        compile_one = [*compiler, *all_flags, *(f"-I{d}" for d in library.headers), "-c"]
        commands = [[*compile_one, str(f), "-o", o] for f, o in zip(files, objects, strict=True)]
        with ThreadPoolExecutor(len(commands)) as runners:
            list(runners.map(_run, commands))
        built = directory / path.name
        _run([*compiler, *all_flags, "-shared", *objects, "-o", str(built), "-lm"])
        built.replace(path)


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except OSError as e:
        raise BuildError(f"cannot run {command[0]}: {e.strerror}") from e
    except subprocess.CalledProcessError as e:
        raise BuildError(f"{shlex.join(command)} failed: {_error_line(e.stderr)}") from e


def _error_line(output: str) -> str:
    lines = output.splitlines() or ["no output"]
    return next((line for line in lines if "error" in line), lines[-1])
