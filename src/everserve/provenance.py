"""Where and from which sources a result was measured: hardware and versions; commit, uncommitted changes, and a hash
that proves both.

The hash is of the content of every file of this package, and of the benchmarks beside it. Git keeps the content of the
same files, so a result whose commit was not known where it was measured (a copy without git) can be matched with its
commit later, and a result that names a commit can be checked against it.
"""

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from everserve import __version__
from everserve.errors import ConfigError

LOCAL = Path("bench/results/local")  # where results go; git ignores it. `publish` puts beside it what documents cite
PACKAGE = Path(__file__).parent
_BENCHES = "everserve_bench"  # beside it; commits before it was a package of its own have none
_IN_REPOSITORY = "src/everserve"  # the same in every commit
_MADE_HERE = {".pyc", ".so"}  # not sources
_MOST_COMMITS = 200  # that `find_commit` looks at
_OUT = re.compile(r" --(?:out|json)[= ]\S+")  # the path of a result says nothing about it


def environment() -> dict[str, Any]:
    """Sources, hardware and versions: what a reader needs to judge or repeat the numbers."""
    import torch  # noqa: PLC0415 (slow; documents are checked without it)

    return {
        **state(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "everserve": __version__,
        "command": without_paths(shlex.join(["everserve", *sys.argv[1:]])),
    }


def without_paths(command: str) -> str:
    return _OUT.sub("", command)


def git(*arguments: str, where: Path | None = None) -> str:
    """What it says; nothing if there is no git, no repository, or no such object."""
    return _said("git", "-C", str(where or PACKAGE), *arguments)


def commit() -> str:
    """The commit of this package; nothing if it is not in a repository of its own, but installed."""
    return git("rev-parse", "--short", "HEAD") if git("ls-files", "__init__.py") else ""


def is_dirty() -> bool:
    """Whether a file of these packages is not what its commit has."""
    return bool(commit()) and bool(git("status", "--porcelain", "--", ".", f"../{_BENCHES}"))


@cache
def state() -> dict[str, str | bool]:
    """The state of the sources of this process: as it was when it was first asked, before a run, and not after an edit
    of a file.
    """
    return {"commit": commit(), "dirty": is_dirty(), "sources": sources()}


def sources() -> str:
    """A hash of all files of these packages."""
    own = (f"{_blob(path)} {path.relative_to(PACKAGE).as_posix()}" for path in _files(PACKAGE))
    beside = PACKAGE.parent / _BENCHES
    return _digest([*own, *(f"{_blob(path)} {path.relative_to(PACKAGE.parent).as_posix()}" for path in _files(beside))])


@cache
def sources_of(name: str) -> str:
    """The same of a commit; nothing if that is not here, as in a shallow clone."""
    listed = git("ls-tree", "-r", "--full-tree", name, f"{_IN_REPOSITORY}/", f"src/{_BENCHES}/")
    entries = (line.split(maxsplit=3) for line in listed.splitlines())
    lines = [f"{blob} {path.removeprefix(f'{_IN_REPOSITORY}/').removeprefix('src/')}" for _, _, blob, path in entries]
    return _digest(lines) if lines else ""


def find_commit(digest: str) -> str:
    """The last one that has these sources; nothing if none of the last few has."""
    commits = git("log", "--format=%h", f"-{_MOST_COMMITS}").split()
    return next((name for name in commits if sources_of(name) == digest), "")


def check_out(directory: Path, flag: str) -> None:
    """Results that documents may cite lie among tracked files; what is written there must be of a commit."""
    if state()["dirty"] and directory.is_dir() and git("ls-files", ".", where=directory):
        raise ConfigError(
            f"{flag} {directory}: results there are of a commit, and the sources have changes that are not committed;"
            f" commit them, or write elsewhere ({LOCAL} is ignored by git)"
        )


def _files(package: Path) -> Iterator[Path]:
    for path in package.rglob("*"):
        if path.is_file() and path.suffix not in _MADE_HERE and "__pycache__" not in path.parts:
            yield path


def _blob(path: Path) -> str:
    """Its name in git."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def _cpu_name() -> str:
    for line in _said("lscpu").splitlines():
        if line.startswith("Model name:"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _said(*command: str) -> str:
    """What the command said on stdout; nothing if it failed or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
