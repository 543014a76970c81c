"""What this process may use of its host: memory and cores, by the host's own numbers and by its cgroups.

A container, a systemd unit or a pod has limits of its own, and the host's numbers are too large there. A limit holds
for a cgroup with everything below it, so the cgroups above ours count too, as far as they can be seen.

The kernel gives memory of cached files away when it is asked for more: it counts as available.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


class _Names(NamedTuple):
    """Files of a cgroup."""

    memory_limits: tuple[str, ...]
    memory_usage: str
    cached: tuple[str, ...]  # in memory.stat: pages of files, of this cgroup and those below it


_V1 = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _Names(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))


def available_bytes(proc: Path = _PROC) -> int:
    """Memory that is free, or that the kernel would free: of the host, or less if a cgroup has less left."""
    left = [_left_in(directory, names) for directory, names in _cgroups("memory", proc)]
    return max(0, min([_free_on_host(proc), *(num_bytes for num_bytes in left if num_bytes is not None)]))


@functools.cache
def num_cores(proc: Path = _PROC) -> int:
    """Cores that this process may use, at least one; a share of a core counts as none."""
    quotas = [_quota_of(directory) for directory, _ in _cgroups("cpu", proc)]
    return max(1, min([len(os.sched_getaffinity(0)), *(int(quota) for quota in quotas if quota is not None)]))


def _free_on_host(proc: Path) -> int:
    lines = (proc / "meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _left_in(directory: Path, names: _Names) -> int | None:
    """None: no limit."""
    limits = [limit for name in names.memory_limits if (limit := _read_number(directory / name)) is not None]
    used = _read_number(directory / names.memory_usage)
    if not limits or used is None:
        return None
    stat = dict(line.split() for line in _read(directory / "memory.stat").splitlines())
    return min(limits) - used + sum(int(stat.get(name, 0)) for name in names.cached)


def _quota_of(directory: Path) -> float | None:
    """The quota in cores; None: no limit."""
    quota, period = (_read(directory / "cpu.max").split() or ["max", "1"])[:2]
    if quota != "max":
        return int(quota) / int(period)
    us, of_us = (_read_number(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return us / of_us if us is not None and us > 0 and of_us else None


def _cgroups(controller: str, proc: Path) -> Iterator[tuple[Path, _Names]]:
    """Our cgroup and those above it, in each hierarchy that may limit this."""
    paths = {}  # by controller; "" is version 2
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in _read(proc / "self/mountinfo").splitlines():
        ours, _, kind = line.partition(" - ")
        root, mounted_at = ours.split()[3:5]
        type_, _, options = kind.split(" ", 2)
        if type_ == "cgroup2" and "" in paths:
            yield from _upwards(Path(mounted_at), root, paths[""], _V2)
        elif type_ == "cgroup" and controller in options.split(",") and controller in paths:
            yield from _upwards(Path(mounted_at), root, paths[controller], _V1)


def _upwards(mounted_at: Path, root: str, path: str, names: _Names) -> Iterator[tuple[Path, _Names]]:
    """`root`: the cgroup that is mounted. Inside a container ours may be named as its host sees it, or as one beside
    that; then what is mounted is the nearest that can be seen."""
    is_below = Path(path).is_relative_to(root) and ".." not in path
    directory = mounted_at / Path(path).relative_to(root) if is_below else mounted_at
    for one in (directory, *directory.parents) if directory.is_dir() else (mounted_at,):
        if one.is_relative_to(mounted_at):
            yield one, names


def _read(path: Path) -> str:
    """Nothing if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    """None if there is none: `max`, or no such file."""
    try:
        return int(_read(path))
    except ValueError:
        return None
