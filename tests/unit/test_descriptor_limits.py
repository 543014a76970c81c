"""Limits on descriptors: too many in flight, too many open. Each in a process of its own, as an ordinary user."""

import os
import resource
import subprocess
import sys

import pytest

from everserve.procs import process

ORDINARY_USER = 54321
BEGIN = """
import os, resource, socket, sys
from everserve.errors import ProtocolError
from everserve.wire.channel import Channel
from everserve.wire.messages import OrchestratorAttached, Ready
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
device = os.open("/dev/null", os.O_RDONLY)
def limit(num_fds):
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_fds, num_fds))
"""
IN_FLIGHT = """
limit(64)
unread = socket.socketpair()
socket.send_fds(unread[0], [b"."], [device] * 100)
a, b = map(Channel, Channel.pair())
a.send(Ready())
a.send(OrchestratorAttached(), fds=[device])
a.send(Ready())
assert a.is_held_back and a.wants_write
assert not a.wait(0.05) and a.is_held_back, "nothing has changed"
assert b.receive_all() == [Ready()]
unread[1].close()
assert a.wait(5) and not a.wants_write and not a.is_held_back
message, fds = b.receive_frame(timeout_s=1)
assert message == OrchestratorAttached() and os.fstat(*fds.take()).st_rdev == os.fstat(device).st_rdev
assert b.receive_all() == [Ready()]
"""
OPEN = """
a, b = map(Channel, Channel.pair())
a.send(Ready())
a.send(OrchestratorAttached(), fds=[device] * 5)
limit(max(map(int, os.listdir("/proc/self/fd"))) + 2)
frames = b.receive_frames()
assert next(frames).message == Ready()
for _ in range(2):
    try:
        print(*b.receive_frames())
    except ProtocolError as error:
        assert "too many open files" in str(error)
    else:
        raise AssertionError("a message without its descriptors")
b.close()
"""


def run(script: str) -> None:
    command = [sys.executable, "-c", BEGIN + script, str(ORDINARY_USER)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if "PermissionError" in done.stderr and os.getuid() == 0:
        pytest.skip("cannot become an ordinary user here")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize("script", [IN_FLIGHT, OPEN], ids=["in flight", "open"])
def test_limits(script):
    """A frame that the kernel cannot take now is sent later; one whose descriptors are lost ends the channel."""
    run(script)


def test_the_soft_limit_is_raised_for_us_and_our_children():
    def limits() -> tuple[int, int]:
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    soft, hard = limits()
    if hard <= 256:
        pytest.skip("no room below the hard limit")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        process.raise_open_files()
        assert limits()[0] == (1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16))
        child = subprocess.run(["sh", "-c", "ulimit -n"], capture_output=True, text=True, check=True)
        assert int(child.stdout) == limits()[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
