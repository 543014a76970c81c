"""What a worker on a device leaves behind: descriptors that outlive it for a moment, and no longer."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from everserve.procs import device_descriptors
from everserve.wire.channel import Channel

LEAVER = """
import os, socket, sys, time
from everserve.wire.channel import Channel
from everserve.procs import device_descriptors
lifeline, device = Channel.of_fd(int(sys.argv[1])), int(sys.argv[2])
device_descriptors.device_fds = lambda: [device] * int(sys.argv[3])
device_descriptors.entrust(lifeline)
print("left", flush=True)
time.sleep(60)
"""
MPS = """
import socket, sys, time
from everserve.procs import process
process.set_name(sys.argv[2])
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
accepted = listener.accept()
time.sleep(60)
"""


def run(script: str, *arguments: object, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen:
    """Until it says something."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    child = subprocess.Popen(command, pass_fds=pass_fds, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    return child


def is_open(reader: int) -> bool:
    """Whether anybody has the other end of this pipe."""
    poll = select.poll()  # select() knows no descriptor above 1023
    poll.register(reader)
    return not poll.poll(50)


@pytest.mark.parametrize("num_fds", [1, 30, 300])
def test_what_a_killed_process_left_is_open_until_its_lifeline_is_closed(num_fds):
    ours, theirs = socket.socketpair()
    reader, device = os.pipe()
    child = run(LEAVER, theirs.fileno(), device, num_fds, pass_fds=(theirs.fileno(), device))
    theirs.close()
    os.close(device)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert is_open(reader)
    ours.close()
    assert not is_open(reader)
    os.close(reader)


@pytest.mark.parametrize(("name", "is_held"), [("nvidia-cuda-mps", True), ("somebody", False)])
def test_connections_to_the_daemon_are_left_too(name, is_held, tmp_path):
    child = run(MPS, tmp_path / "socket", name)
    with socket.socket(socket.AF_UNIX) as connection, socket.socket(socket.AF_UNIX) as unconnected:
        connection.connect(str(tmp_path / "socket"))
        assert (connection.fileno() in device_descriptors.device_fds()) == is_held
        assert unconnected.fileno() not in device_descriptors.device_fds()
    child.kill()
    child.communicate()


def test_the_drivers_files_are_left(monkeypatch):
    with Path("/dev/null").open() as file:
        assert file.fileno() not in device_descriptors.device_fds()
        monkeypatch.setattr(device_descriptors, "_DEVICES", "/dev/null")
        assert file.fileno() in device_descriptors.device_fds()


def test_one_that_cannot_leave_anything_works_on(caplog, monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(device_descriptors, "device_fds", lambda: [0])
    ours.close()
    with theirs:
        device_descriptors.entrust(Channel(theirs))
