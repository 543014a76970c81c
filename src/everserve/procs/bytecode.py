"""Bytecode of what the processes of an instance import, kept where Python would keep none.

Python compiles a module when it is imported, and keeps the result beside the source. It does not if it is told so
(PYTHONDONTWRITEBYTECODE, as in many container images), or if the directory is another user's. Then every process
compiles what it imports, in every start; for the zygote that is more than all the rest of its imports. So it is kept in
the user's cache, as compiled C is. Python compares what it finds there with the sources.

Imports nothing but the standard library, as little of it as possible: this comes before the first process.
"""

import importlib.util
import os
import sys
from pathlib import Path

from everserve import user_cache

_LARGEST = "torch"  # it stands for all that is imported


def keep_bytecode(largest: str = _LARGEST) -> None:
    """For this process from now on, and for those that it starts; if there is none, and Python would write none."""
    if _is_kept(largest):
        return
    try:
        place = user_cache.directory() / "bytecode"
    except (user_cache.CacheError, OSError, RuntimeError):  # there is no home
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(place), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(place)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _is_kept(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return True
    kept = Path(importlib.util.cache_from_source(spec.origin))
    if kept.exists():
        return True
    there = next(path for path in kept.parents if path.exists())
    return not sys.dont_write_bytecode and os.access(there, os.W_OK)
