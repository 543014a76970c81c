"""The user's cache, where this machine keeps what it has compiled: $XDG_CACHE_HOME/everserve, or ~/.cache/everserve."""

import os
from pathlib import Path


class CacheError(RuntimeError):
    """It cannot be used. The message is one line that says why."""


def directory() -> Path:
    """It exists, and it is ours: code is loaded from there."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "everserve"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise CacheError(
            f"cannot create the cache directory {path}: {e.strerror}; set XDG_CACHE_HOME to one you own"
        ) from e
    if path.stat().st_uid != os.getuid() or not os.access(path, os.W_OK):
        raise CacheError(f"the cache directory {path} is not yours to write; set XDG_CACHE_HOME to one you own")
    return path
