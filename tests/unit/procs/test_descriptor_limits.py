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
from everserve.wire.messages import OrchestratorAttached, Ready, StartZygote
from everserve.zygote.__main__ import Zygote
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
WAITS = """
ours, theirs = Channel.pair()
a, b = Channel(ours), Channel(theirs, waits_for_room=True)
a.send(Ready())
a.send(OrchestratorAttached(), fds=[device] * 5)
a.send(Ready())
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
own = os.dup(device)
before = sorted(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + 2, hard))
for _ in range(3):
    assert b.receive_all() == [] and b.has_no_room
try:
    while not a.wants_write:
        a.send(Ready(), fds=[device] * 253)
except OSError as error:
    assert error.errno == 24 and not a.wants_write, "what has to wait needs duplicates"
else:
    raise AssertionError("there was room")
a.give(OrchestratorAttached(), [own])
assert a.wants_write, "it needs none"
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
assert sorted(os.listdir("/proc/self/fd")) == before, "nothing was received, nothing leaks"
assert b.receive_frame(timeout_s=5).message == Ready()
message, fds = b.receive_frame(timeout_s=5)
assert message == OrchestratorAttached() and not b.has_no_room
assert [os.fstat(fd).st_rdev for fd in fds._fds] == [os.fstat(device).st_rdev] * 5
del fds
assert b.receive_frame(timeout_s=5).message == Ready()
while (frame := b.receive_frame(timeout_s=5)).message == Ready():
    assert len(frame.fds) == 253
    a.flush()
assert frame.message == OrchestratorAttached() and len(frame.fds) == 1
frame = None
assert len(os.listdir("/proc/self/fd")) == len(before) - 1
"""
FORKS = """
start = StartZygote(device="cpu", environment={}, num_spares=0, like=())
zygote = Zygote(Channel(Channel.pair()[0]), os.getpid(), start)
before, failed = os.listdir("/proc/self/fd"), 0
hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
for limit in range(1, 100_000):
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, hard))
    try:
        pid = zygote._fork_orphan(lambda: 0)
        break
    except BlockingIOError:
        failed += 1
    assert os.listdir("/proc/self/fd") == before
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        continue
    raise AssertionError("a child is left")
assert pid > 0 and failed >= 2, "the first of both forks failed, and the second"
"""


def run(script: str) -> None:
    command = [sys.executable, "-c", BEGIN + script, str(ORDINARY_USER)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if "PermissionError" in done.stderr and os.getuid() == 0:
        pytest.skip("cannot become an ordinary user here")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize("script", [IN_FLIGHT, OPEN, WAITS], ids=["in flight", "open", "open, without a successor"])
def test_limits(script):
    """A frame that the kernel cannot take now is sent later; one whose descriptors are lost ends the channel, or waits
    until there is room."""
    run(script)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_fork_that_fails_leaves_nothing():
    """Neither the first of the zygote's two forks, nor the second, in a process that must not go on as a zygote."""
    run(FORKS)


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
