"""Copies of a process's device descriptors, held by the supervisor so that its death does not fault its device.

A process that is killed may have work queued on its device. The kernel closes its descriptors at once; the driver then
frees the memory that this work uses. The work faults, and under MPS a fault hits every process on the device. So a
worker sends copies of these descriptors to the supervisor, which closes them a moment after the worker's end. Until
then the driver does not see the death, and queued work completes. Work that is still left waits for a word in memory,
and may be discarded.

    worker, spare, anchor ── DeviceDescriptors ──> supervisor, which holds them (procs/deferred_close.py)

A descriptor in flight is open, and reading it does not close it in between. So there is a copy from the worker's send
on, whether the supervisor has read it or not; the supervisor closes its end of the lifeline together with the copies.

The supervisor must read them because the kernel limits the descriptors that a user has in flight, over all processes:
the copies of all workers would use up that limit.
"""

import logging
import os
import socket
import struct
from collections.abc import Collection
from pathlib import Path

from everserve.wire.channel import MAX_FDS, Channel
from everserve.wire.messages import DeviceDescriptors

log = logging.getLogger(__name__)

# A step takes some milliseconds, at most half of this time with a long prompt (plan/steps.py), and a dead worker starts
# no other step.
CLOSE_AFTER_S = 0.5
_DEVICES, _MPS_NAME = "/dev/nvidia", "nvidia-cuda-mps"


def entrust(lifeline: Channel, but: Collection[int] = ()) -> int:
    """Send copies of all device descriptors that this process has open now, `but` those. Returns how many.

    Descriptors of device memory look like all others. Copies of them would keep that memory when it was released, for
    as long as this process lives; the work that is queued needs only the context that has it mapped.
    """
    fds = [fd for fd in device_fds() if fd not in but]
    try:
        for begin in range(0, len(fds), MAX_FDS):
            num_following = (len(fds) - begin - 1) // MAX_FDS
            lifeline.send(DeviceDescriptors(num_following=num_following), fds[begin : begin + MAX_FDS])
    except OSError as error:  # too many open files
        warn(error)
    return len(fds)


def warn(why: object) -> None:
    log.warning("if this worker is killed, others on its device may be harmed: %s", why)


def device_fds() -> list[int]:
    """The driver's device files, and its connections to the MPS daemon."""
    return [fd for fd in (int(path.name) for path in Path("/proc/self/fd").iterdir()) if _is_device(fd)]


def _is_device(fd: int) -> bool:
    try:
        target = str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:  # closed meanwhile
        return False
    return target.startswith(_DEVICES) or (target.startswith("socket:") and _is_mps(fd))


def _is_mps(fd: int) -> bool:
    """Whether the peer of this socket is a process of MPS."""
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            pid, _, _ = struct.unpack("3i", copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return Path(f"/proc/{pid}/comm").read_text().startswith(_MPS_NAME)
    except OSError:
        return False
