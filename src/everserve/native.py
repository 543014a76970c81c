"""C beside Python: compile a directory of *.c for this machine, once, with the system's compiler.

CC and CFLAGS mean what they mean to make. The library is kept in the user's cache under two keys, which are everything
it depends on: sources, flags and CPU; and the compiler:

    $XDG_CACHE_HOME/everserve/<name>-<key>-<compiler>.so       (~/.cache where XDG_CACHE_HOME is not set)

Without a compiler the newest library with the first key serves: a machine whose cache is filled needs none.

Several processes may build at once: each compiles in a directory of its own and renames the result into place. Only the
standard library is imported: processes without torch use this too.
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
from pathlib import Path

from everserve import user_cache

CPU_FLAG = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
# Contraction is off: where a multiply-add is fused is part of the kernels' definition (backends/cpu/csrc/ops/simd.h).
FLAGS = [
    "-O3",
    CPU_FLAG,
    "-std=c11",
    "-fPIC",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
]


class BuildError(RuntimeError):
    """A library cannot be built here. The message is one line that says why."""


def _flags() -> list[str]:
    return FLAGS + shlex.split(os.environ.get("CFLAGS", ""))


def library(name: str, sources: Path, *, headers: Sequence[Path] = ()) -> Path:
    """The path of the library compiled from `sources`/*.c; compiles it if this machine has not done so before.

    `headers` are other directories to include from.
    """
    cache, key, compiler = _cache_dir(), _key(sources, headers), _compiler()
    if compiler is None:
        built = sorted(cache.glob(f"{name}-{key}-*.so"), key=lambda path: path.stat().st_mtime_ns)
        if not built:
            raise BuildError("no C compiler found (cc, gcc or clang; set CC to use another)")
        return built[-1]
    path = cache / f"{name}-{key}-{_digest(_version(*compiler))}.so"
    if not path.exists():
        _build(compiler, sources, headers, path)
    return path


def _compiler() -> list[str] | None:
    """None: there is none. One that CC names is taken at its word."""
    if "CC" in os.environ:
        return shlex.split(os.environ["CC"])
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def _cache_dir() -> Path:
    try:
        return user_cache.directory()
    except user_cache.CacheError as error:
        raise BuildError(str(error)) from error


def _key(sources: Path, headers: Sequence[Path]) -> str:
    files = [*sorted(sources.iterdir()), *(header for d in headers for header in sorted(d.glob("*.h")))]
    return _digest(*(file.name.encode() + file.read_bytes() for file in files), " ".join(_flags()), _cpu())


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


def _build(compiler: list[str], sources: Path, headers: Sequence[Path], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as name:
        directory, files = Path(name), sorted(sources.glob("*.c"))
        objects = [str(directory / f"{file.stem}.o") for file in files]
        compile_one = [*compiler, *_flags(), *(f"-I{d}" for d in headers), "-c"]
        commands = [[*compile_one, str(f), "-o", o] for f, o in zip(files, objects, strict=True)]
        with ThreadPoolExecutor(len(commands)) as runners:
            list(runners.map(_run, commands))
        built = directory / path.name
        _run([*compiler, *_flags(), "-shared", *objects, "-o", str(built), "-lm"])
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
