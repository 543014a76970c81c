"""What the processes of a server on this host hold. After any number of deaths it must be what it was before."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from everserve.chaos.target import View
from everserve.procs import process

_MEMORY = "/memfd:everserve-"  # how our shared memory is called in /proc

# The gateway has a socket for each client that happens to be connected, and so has its keeper; one of them is ours, for
# /cluster. The descriptors of all other processes are channels and memory, and their number follows from the set of
# processes. Fewer is no leak: a new anchor has no descriptors of memory that its workers hold already.
_MORE_FDS = {"gateway": 2, "keeper": 2}

# On a device, descriptors keep memory that no process has mapped, and nothing tells how much: what is left is to ask
# how much of all devices is in use. That is the same before and after, but for what each process that uses a device
# keeps for itself: torch's caches, which grow with the requests it happened to get (2 to 20 MiB at a time), and the
# code of kernels, loaded as they are needed (some tens of MiB for all). What could leak is larger, or leaks with each
# death: a KV pool, the weights of a seat, a context (hundreds of MiB), a lane of each pair (2 MiB or more).
_DEVICE_FILE = re.compile(r"/dev/nvidia\d+")
_MORE_DEVICE_BYTES = 64 << 20  # for each process that uses a device
_DEVICE_QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
_DEVICE_ANSWERS_S = 20.0


class Holding(NamedTuple):
    """What one process holds."""

    num_fds: int
    mappings: Counter[str]  # how many there are of each kind of our shared memory
    uses_device: bool = False

    def as_json(self) -> dict[str, Any]:
        return {"num_fds": self.num_fds, "mappings": dict(self.mappings), "uses_device": self.uses_device}


@dataclass(frozen=True)
class Snapshot:
    """What all processes of one server hold, at one moment in which it is idle."""

    holdings: dict[str, Holding]  # by rank or name of the process
    strays: tuple[str, ...]  # descendants of root that /cluster does not know, and unreaped dead ones
    num_memories: int  # pieces of shared memory, each counted once however many processes have it
    memory_bytes: int  # their sizes
    resident_bytes: int  # of those sizes, what was ever touched: grows to a limit, so it is no verdict
    device_bytes: int | None = None  # in use on all devices, by any process; None: we use none, or it cannot be asked

    @property
    def totals(self) -> dict[str, int]:
        return {
            "processes": len(self.holdings),
            "strays": len(self.strays),
            "descriptors": sum(holding.num_fds for holding in self.holdings.values()),
            "mappings": sum(holding.mappings.total() for holding in self.holdings.values()),
            "memories": self.num_memories,
            "memory_bytes": self.memory_bytes,
            "resident_bytes": self.resident_bytes,
            "device_bytes": self.device_bytes or 0,
        }

    @property
    def num_device_users(self) -> int:
        return sum(holding.uses_device for holding in self.holdings.values())

    def as_json(self) -> dict[str, Any]:
        return self.totals | {"each": {name: holding.as_json() for name, holding in self.holdings.items()}}


def take(view: View, root: int) -> Snapshot:
    """Look at all processes. One that ends meanwhile is not counted."""
    names = {pid: name for name, pid in view.pids.items()}
    # The gateway's own: processes that render chat templates.
    names |= dict.fromkeys(process.children_of(view.pids.get("gateway", 0)), "templates")
    holdings: dict[str, Holding] = {}
    held: dict[int, _Memory] = {}
    mapped: dict[int, _Memory] = {}
    strays: list[str] = []
    for pid in (root, *_descendants(root)):
        state = process.state_of(pid)
        if pid not in names or state in ("Z", "X"):
            strays.append(f"pid {pid} (state {state}, {_command(pid)})")
            continue
        num_fds, by_descriptor, uses_device = _descriptors(pid)
        by_mapping = _mappings(pid)
        holdings[names[pid]] = Holding(num_fds, Counter(memory.kind for memory in by_mapping), uses_device)
        held |= {memory.inode: memory for memory in by_descriptor}
        mapped |= {memory.inode: memory for memory in by_mapping}
    memories = list((mapped | held).values())  # a descriptor knows more of a memory than a mapping does
    return Snapshot(
        holdings,
        tuple(strays),
        len(memories),
        sum(memory.num_bytes for memory in memories),
        sum(memory.num_resident for memory in memories),
        _device_bytes() if any(holding.uses_device for holding in holdings.values()) else None,
    )


def compare(before: Snapshot, after: Snapshot) -> list[str]:
    """What is there after and was not before, or was there and is missing."""
    found = [f"a process that should not be there: {stray}" for stray in after.strays]
    if before.holdings.keys() != after.holdings.keys():
        found.append(f"processes: {sorted(before.holdings)} before, {sorted(after.holdings)} after")
    for name in before.holdings.keys() & after.holdings.keys():
        old, new = before.holdings[name], after.holdings[name]
        if new.num_fds > old.num_fds + _MORE_FDS.get(name.partition("-")[0], 0):
            found.append(f"{name}: {old.num_fds} descriptors before, {new.num_fds} after")
        more, fewer = new.mappings - old.mappings, old.mappings - new.mappings
        if more or fewer:
            changes = [f"+{n} {memory}" for memory, n in more.items()] + [
                f"-{n} {memory}" for memory, n in fewer.items()
            ]
            found.append(f"{name}: mappings: {', '.join(sorted(changes))}")
    if after.num_memories != before.num_memories:
        found.append(f"pieces of shared memory: {before.num_memories} before, {after.num_memories} after")
    if after.memory_bytes > before.memory_bytes:
        found.append(f"bytes of shared memory: {before.memory_bytes} before, {after.memory_bytes} after")
    if before.device_bytes is not None and after.device_bytes is not None:
        allowed = before.device_bytes + _MORE_DEVICE_BYTES * max(before.num_device_users, after.num_device_users)
        if after.device_bytes > allowed:
            found.append(f"bytes of device memory: {before.device_bytes} before, {after.device_bytes} after")
    return sorted(found)


class _Memory(NamedTuple):
    """A piece of our shared memory as one process has it."""

    kind: str  # "lane", "log", ...
    inode: int
    num_bytes: int
    num_resident: int


def _descendants(pid: int) -> Iterator[int]:
    for child in process.children_of(pid):
        yield child
        yield from _descendants(child)


def _descriptors(pid: int) -> tuple[int, list[_Memory], bool]:
    """How many there are, those that are our memory, and whether one is a device's."""
    paths = _list(f"/proc/{pid}/fd")
    memories, uses_device = [], False
    for path in paths:
        try:
            target = str(path.readlink())
            uses_device = uses_device or _DEVICE_FILE.fullmatch(target) is not None
            if target.startswith(_MEMORY):
                stat = path.stat()
                memories.append(_Memory(_kind_of(target), stat.st_ino, stat.st_size, 512 * stat.st_blocks))
        except OSError:
            continue
    return len(paths), memories, uses_device


def _device_bytes() -> int | None:
    """Bytes in use on all devices, by any process: a search for leaks should have the devices to itself."""
    try:
        done = subprocess.run(_DEVICE_QUERY, capture_output=True, text=True, timeout=_DEVICE_ANSWERS_S, check=True)
        return sum(int(line) << 20 for line in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _mappings(pid: int) -> list[_Memory]:
    """Those of our memory."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        place, _, offset, _, inode, *path = line.split(maxsplit=5)
        if path and path[0].startswith(_MEMORY):
            begin, end = (int(address, 16) for address in place.split("-"))
            found.append(_Memory(_kind_of(path[0]), int(inode), int(offset, 16) + end - begin, 0))
    return found


def _kind_of(path: str) -> str:
    """The kind of memory, without whose it is: incarnations differ after a death."""
    return path.removeprefix(_MEMORY).removesuffix(" (deleted)").split("-")[0]


def _list(directory: str) -> list[Path]:
    try:
        return list(Path(directory).iterdir())
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
