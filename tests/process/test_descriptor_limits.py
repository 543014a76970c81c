"""A cluster of a user without privileges, who has as many descriptors in flight as the kernel allows: it waits, and
goes on when there is room. Root has privileges that would hide it, so the cluster is started without them."""

import ctypes
import os
import resource
import subprocess
import sys

import pytest

HARD_LIMIT = 256
CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 21, 24  # either of them lifts the limit
PR_CAPBSET_DROP = 24

USER = """
import errno, os, signal, socket, sys
from everserve.procs.local_server import LocalServer
from tests.support.cluster import DECODE, is_alive, run_all, wait_until

class Parked:
    '''More descriptors in flight than this user may have.'''

    def __init__(self):
        self.ends = socket.socketpair()
        with open(os.devnull) as file:
            for _ in range(2):
                socket.send_fds(self.ends[0], [b'.'], [file.fileno()] * 200)

    def is_felt(self):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                socket.send_fds(ours, [b'.'], [0])
            except OSError as error:
                assert error.errno == errno.ETOOMANYREFS, error
                return True
            return False

    def release(self):
        for end in self.ends:
            end.close()

def started(events):
    return {event['child']: event['child_pid'] for event in events if event['event'] == 'process_started'}

def workers(events):
    return {(e['rank'], e['incarnation']): e['worker_pid'] for e in events if e['event'] == 'worker_started'}

first = Parked()
if not first.is_felt():
    sys.exit(77)  # there is no such limit for us

def on_wait(events):
    if len(started(events)) == 4 and first.is_felt():
        assert not workers(events), 'nothing that carries descriptors can have been sent'
        first.release()

with LocalServer('demo', '--attention-workers', '2', '--expert-workers', '2', on_wait=on_wait) as server:
    helpers = started(server.events())
    answers = run_all(server, DECODE)
    second = Parked()
    victim = workers(server.events())[3, 1]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not is_alive(victim))
    assert run_all(server, DECODE) == answers, 'its shadow has taken over'
    assert second.is_felt() and (3, 2) not in workers(server.events())
    second.release()
    wait_until(lambda: (3, 2) in workers(server.events()), what='the replacement')
    ready = lambda: [e for e in server.events() if e['event'] == 'worker_became_ready' and e['incarnation'] == 2]
    wait_until(ready, what='its readiness')
    assert run_all(server, DECODE) == answers
    assert started(server.events()) == helpers and all(map(is_alive, helpers.values())), 'no helper has died of it'
"""


def become_ordinary() -> None:
    """In the new process: as root without the two privileges (they are not regained by exec); with few descriptors."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (CAP_SYS_ADMIN, CAP_SYS_RESOURCE) if os.getuid() == 0 else ():
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "cannot drop a capability")
    resource.setrlimit(resource.RLIMIT_NOFILE, (HARD_LIMIT, HARD_LIMIT))


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of Linux")
@pytest.mark.long
def test_too_many_descriptors_in_flight_are_waited_for():
    done = subprocess.run(
        [sys.executable, "-c", USER],
        preexec_fn=become_ordinary,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this kernel does not bound descriptors in flight")
    assert done.returncode == 0, done.stderr
