"""What a worker on a shared device leaves behind, so that its death harms nobody.

A process that is killed may have work queued on its device. The kernel closes its descriptors at once; the driver then
takes the memory away from under that work, which faults, and under MPS a fault is everybody's. So a worker leaves
copies of these descriptors with the supervisor, which closes them a moment after the worker's end. Until then nothing
has happened as far as the driver knows, and what was queued comes to its end: what is left then waits for a word, and
may be thrown away.

    worker, spare, anchor ── DeviceDescriptors ──> supervisor, which holds them (procs/deferred_close.py)

A descriptor on its way is open, and a read moves it into the reader's table without closing it in between. So from the
worker's send on there is a copy, whether the supervisor has come to read it or not; it closes its end of the lifeline
as late as the copies.

The supervisor reads them because the kernel bounds the descriptors that a user has in flight, in all processes
together: those of all workers, for as long as they live, would leave no room for others.
"""

import logging
import os
import socket
import struct
from pathlib import Path

from everserve.wire.channel import MAX_FDS, Channel
from everserve.wire.messages import DeviceDescriptors

log = logging.getLogger(__name__)

# A step takes some milliseconds, at most half of this if it has a long prompt (plan/steps.py), and nothing asks a dead
# worker for another one.
PARTING_S = 0.5
_DEVICES, _MPS_NAME = "/dev/nvidia", "nvidia-cuda-mps"


def entrust(lifeline: Channel) -> int:
    """Copies of everything that ties us to the device, as it is now. Returns how many."""
    fds = device_fds()
    try:
        for begin in range(0, len(fds), MAX_FDS):
            num_following = (len(fds) - begin - 1) // MAX_FDS
            lifeline.send(DeviceDescriptors(num_following=num_following), fds[begin : begin + MAX_FDS])
    except OSError as error:  # too many are open
        warn(error)
    return len(fds)


def warn(why: object) -> None:
    log.warning("if this worker is killed, others on its device may be harmed: %s", why)


def device_fds() -> list[int]:
    """The driver's own files, and its connections to the MPS daemon."""
    return [fd for fd in (int(path.name) for path in Path("/proc/self/fd").iterdir()) if _is_device(fd)]


def _is_device(fd: int) -> bool:
    try:
        target = str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:  # closed meanwhile
        return False
    return target.startswith(_DEVICES) or (target.startswith("socket:") and _is_mps(fd))


def _is_mps(fd: int) -> bool:
    """Whether the process at the other end is MPS's."""
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            pid, _, _ = struct.unpack("3i", copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return Path(f"/proc/{pid}/comm").read_text().startswith(_MPS_NAME)
    except OSError:
        return False
