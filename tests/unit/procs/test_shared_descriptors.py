"""A process that shares its descriptors with its parent. Each case runs in an interpreter of its own: the caller of
`clone` must have one thread."""

import subprocess
import sys

import pytest

PRELUDE = """
import os, signal, socket, sys, threading
from everserve.procs.shared_descriptors import CLONE_FILES, CLONE_PARENT, can_share_descriptors, clone
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_child_had_open_outlives_its_death() -> None:
    """Four lives, each ended by SIGKILL, use one connection; each opens another one that the parent finds."""
    code = """
ours, theirs = socket.socketpair()
for life in range(4):
    before = set(os.listdir("/proc/self/fd"))
    pid = clone(CLONE_FILES)
    if pid == 0:
        theirs.send(theirs.recv(100).upper())
        socket.socketpair()[0].detach()
        os.kill(os.getpid(), signal.SIGKILL)
    ours.send(b"life %d" % life)
    print(ours.recv(100).decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(len(set(os.listdir("/proc/self/fd")) - before))
"""
    assert run(code).split("\n") == [line for life in range(4) for line in (f"LIFE {life} -9", "1")] + [""]


def test_a_child_is_a_whole_interpreter() -> None:
    """It has its own pid and thread id, starts threads, raises signals, and starts processes."""
    code = """
pid = clone(CLONE_FILES)
if pid == 0:
    assert threading.get_native_id() == os.getpid()
    thread = threading.Thread(target=lambda: print("thread", flush=True)); thread.start(); thread.join()
    import subprocess
    subprocess.run(["echo", "process"], check=True)
    signal.signal(signal.SIGUSR1, lambda *_: print("signal", flush=True))
    signal.raise_signal(signal.SIGUSR1)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), can_share_descriptors())
"""
    assert run(code).split() == ["thread", "process", "signal", "7", "True"]


def test_a_sibling_is_a_child_of_the_callers_parent() -> None:
    code = """
reader, writer = os.pipe()
middle = os.fork()
if middle == 0:
    sibling = clone(CLONE_PARENT)
    if sibling == 0:
        os.write(writer, b"%d" % os.getppid())
        os._exit(3)
    os._exit(0)
assert int(os.read(reader, 100)) == os.getpid()
print(sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)))
"""
    assert run(code) == "[0, 3]\n"


def test_a_refusal_is_an_error_of_the_system() -> None:
    code = """
try:
    clone(CLONE_FILES | 0x10000)  # CLONE_THREAD without what it needs
except OSError as error:
    print(error.errno, threading.active_count())
"""
    assert run(code) == "22 1\n"


def test_not_from_a_process_with_threads() -> None:
    code = """
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    clone(CLONE_FILES)
except AssertionError as error:
    print(error)
sys.stdout.flush()
os._exit(0)
"""
    assert "threads" in run(code)


@pytest.fixture(autouse=True)
def _only_on_linux() -> None:
    if sys.platform != "linux":
        pytest.skip("Linux only")
