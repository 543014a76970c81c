"""Root is killed: everything ends with it. (The last user of a server that others share.)"""

import os
import signal
from pathlib import Path

from tests.support import cluster as c
from tests.support.shared_servers import CLUSTER


def test_nothing_is_left_after_root_is_killed(shared_servers):
    """Not even a stopped worker. Shared memory and sockets have no names, so nothing else could be left."""
    with shared_servers.lend(*CLUSTER) as server:
        now = c.cluster(server)
        pids = [one["pid"] for one in now["processes"] + now["workers"]]
        assert len(pids) == 7 + 4
        assert not named_memory(pids) and not named_sockets(pids)
        os.kill(now["workers"][-1]["pid"], signal.SIGSTOP)
        server.process.kill()
        c.wait_until(lambda: not any(c.is_alive(pid) for pid in pids), what="the end of all processes")
    assert not list(Path("/dev/shm").glob("*everserve*"))


def named_memory(pids: list[int]) -> list[str]:
    """What these processes have mapped of files that any process could open."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [line for line in lines if "/dev/shm/" in line]


def named_sockets(pids: list[int]) -> set[str]:
    """Unix sockets of these processes that have a name, in the file system or in the kernel's own space of names."""
    rows = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = {f"socket:[{row[6]}]": row[7] for row in rows if len(row) == 8}
    opened = {str(fd.readlink()) for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir()}
    return {name for inode, name in names.items() if inode in opened}
