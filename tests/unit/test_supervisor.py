"""The supervisor's loop: a child that closes its channel and does not end holds nobody up."""

import gc
import selectors
import signal
import socket
import subprocess
import sys

import pytest

from everserve.procs.supervisor import Child, Supervisor
from everserve.wire.channel import Channel
from everserve.wire.messages import DropMemory, Ready, SparesChanged

LINGERS = """
import signal, socket, sys
socket.socket(fileno=int(sys.argv[1])).close()
print("closed", flush=True)
signal.pause()
"""


class NoSignals:
    """What `_step` wants."""


@pytest.fixture
def supervisor(monkeypatch):
    with socket.socket() as listen:
        listen.bind(("127.0.0.1", 0))
        supervisor = Supervisor(listen, None, None, 0.0, None, lambda url: None)
    supervisor.restarted = []
    monkeypatch.setattr(supervisor, "_restart", supervisor.restarted.append)
    yield supervisor
    supervisor._kill_everything()
    gc.collect()  # sockets that are parts of cycles


def add(supervisor: Supervisor, name: str, script: str) -> tuple[Child, Channel]:
    """A child, and the other end of its channel (which a script that closes its own does not need)."""
    ours, theirs = Channel.pair()
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE
    )
    child = Child(name, process, Channel(ours))
    supervisor._children[name] = child
    supervisor._selector.register(child.control, selectors.EVENT_READ, child)
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    return child, Channel(theirs)


def test_a_child_that_lingers_after_the_end_of_its_channel_holds_nobody_up(supervisor):
    lingering, end = add(supervisor, "anchor", LINGERS)
    zygote, zygote_end = add(supervisor, "zygote", "import signal; print('up', flush=True); signal.pause()")
    end.close()
    zygote_end.send(SparesChanged(pids=(7,), num_wanted=1))
    supervisor._step(NoSignals())
    assert lingering.process.poll() is None and lingering.end_by is not None, "it is given its time"
    assert supervisor._spares.pids == (7,), "others are heard meanwhile"
    zygote_end.send(SparesChanged(pids=(8,), num_wanted=1))
    supervisor._send("anchor", DropMemory(name="to nobody"))
    supervisor._step(NoSignals())
    assert supervisor._spares.pids == (8,) and "anchor" in supervisor._children and not supervisor.restarted
    lingering.end_by -= 1000.0  # its time is over
    supervisor._step(NoSignals())
    assert lingering.process.wait(timeout=30) == -signal.SIGKILL
    supervisor._step(NoSignals())
    assert "anchor" not in supervisor._children and supervisor.restarted == ["anchor"]
    assert zygote.process.poll() is None


def test_a_child_that_ends_is_replaced_at_once(supervisor):
    ended, end = add(supervisor, "orchestrator", "print('up', flush=True)")
    end.send(Ready())
    end.close()
    ended.process.wait(timeout=30)
    while "orchestrator" in supervisor._children:
        supervisor._step(NoSignals())
    assert ended.is_ready, "its last words were heard"
    assert supervisor.restarted == ["orchestrator"]
