"""Root and its supervisors, each case in an interpreter of its own. The supervisors do what the case says; what they
start are shells."""

import signal
import subprocess
import sys

import pytest

from tests.support.cluster import is_alive, wait_until

PRELUDE = """
import os, signal, subprocess, sys, time
from everserve.procs import root
from everserve.procs.process import children_of

def launch(name, fds, environment):
    if name == "nothing":
        raise BlockingIOError(11, "no process")
    child = subprocess.Popen(["sh", "-c", name], env=environment, pass_fds=fds.values())
    child.returncode = 0
    return child.pid

def begin(end):
    os.pwrite(end.table_fd, bytes([1] * 16), 0)

def die(signum=signal.SIGKILL):
    os.kill(os.getpid(), signum)

def next_exit(end):
    while True:
        end.wait(1.0)
        for exit in end.exits():
            return exit

def say(*words):
    print(*words, flush=True)

root.launch = launch
"""


def run(code: str, status: int = 0) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stdout.splitlines()


def test_what_a_supervisor_had_open_is_the_next_ones():
    code = """
def first(end):
    begin(end)
    reader, writer = os.pipe()
    os.write(writer, b"from the first")
    say("first", reader, end.before)
    die()

def second(end):
    fd = max(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))
    found = [fd for fd in range(3, fd + 1) if is_filled(fd)]
    say("second", *found, end.before)
    end.close_others(frozenset())
    say([fd for fd in found if is_filled(fd)])
    end.done(7)
    return 7

def is_filled(fd):
    import fcntl, stat, struct, termios
    try:
        waiting = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"0000"))
        return stat.S_ISFIFO(os.fstat(fd).st_mode) and waiting == (14,)
    except OSError:
        return False

sys.exit(root.run(first, second))
"""
    first, second, closed = run(code, status=7)
    reader = first.split()[1]
    assert first.split() == ["first", reader, "None"] and reader in second.split()[1:-1]
    assert second.split()[-1] == "-9" and closed == "[]"


def test_an_end_is_told_until_it_was_recorded_and_only_then_is_the_pid_free():
    code = """
def first(end):
    begin(end)
    say(end.start("exit 3", {}, os.environ))
    for exit in end.exits() if end.wait(60) is None else ():
        say("told", *exit)
        die()

def second(end):
    for exit in end.exits() if end.wait(60) is None else ():
        say("told", *exit, os.path.exists(f"/proc/{exit.pid}"))
    while os.path.exists(f"/proc/{exit.pid}"):
        time.sleep(0.001)
    end.done(0)
    return 0

sys.exit(root.run(first, second))
"""
    pid, *told = run(code)
    assert told == [f"told {pid} 3", f"told {pid} 3 True"]


def test_ends_come_one_by_one_also_while_something_is_started():
    code = """
def only(end):
    begin(end)
    pids = {end.start("kill -9 $$", {}, os.environ) for _ in range(5)}
    while pids:
        pid, status = next_exit(end)
        end._send({"recorded": pid})
        assert status == -9, status
        pids.remove(pid)
    try:
        end.start("nothing", {}, os.environ)
    except BlockingIOError as error:
        say(error)
    end.done(0)
    return 0

sys.exit(root.run(only, only))
"""
    assert run(code) == ["[Errno 11] no process"]


def test_what_is_started_has_the_environment_and_descriptors_that_were_named():
    code = """
def only(end):
    begin(end)
    reader, writer = os.pipe()
    environment = {**os.environ, "MORE": "1"}
    del environment["HOME"]
    end.start(f'echo "$MORE-$HOME-$PPID" > /proc/self/fd/{writer}', {"fd": writer}, environment)
    said = os.read(reader, 100).decode().split("-")
    say(said[0], said[1] == "", int(said[2]) == end.root_pid)
    end.done(0)
    return 0

os.environ["HOME"] = "/x"
sys.exit(root.run(only, only))
"""
    assert run(code) == ["1 True True"]


@pytest.mark.parametrize("how", ["signal.SIGSTOP", "signal.SIGSEGV", "silence", "an exception"])
def test_a_supervisor_that_does_not_go_on_is_replaced(how):
    code = f"""
def first(end):
    begin(end)
    if {how!r} == "silence":
        signal.pause()
    if {how!r} == "an exception":
        raise ValueError("a bug")
    die({how if how.startswith("signal") else "None"})

def second(end):
    say("second", end.before)
    end.done(0)
    return 0

root._SILENT_S = root._FIRST_WORD_S = 0.3
sys.exit(root.run(first, second))
"""
    before = {"signal.SIGSEGV": -11, "an exception": 70}.get(how, -9)
    assert run(code) == [f"second {before}"]


def test_signals_reach_the_supervisor_and_are_told_to_the_next_one():
    code = """
def first(end):
    signal.signal(signal.SIGTERM, lambda *_: die())
    begin(end)
    os.kill(end.root_pid, signal.SIGTERM)
    signal.pause()

def second(end):
    say(end.stops)
    end.done(0)
    return 0

sys.exit(root.run(first, second))
"""
    assert run(code) == [f"({int(signal.SIGTERM)},)"]


@pytest.mark.parametrize("status", [0, 2])
def test_a_command_that_does_not_begin_an_instance_just_ends(status):
    assert run(f"sys.exit(root.run(lambda end: say('once') or {status}, None))", status) == ["once"]


def test_a_command_that_is_killed_before_that_begins_anew():
    code = """
def command(end):
    if end.before is None:
        end.start("exec sleep 1000", {}, os.environ)
        die()
    say("again", len(end.children()))
    return 4

sys.exit(root.run(command, None))
"""
    assert run(code, status=4) == ["again 0"]


def test_supervisors_that_die_again_and_again_are_the_end():
    code = """
def first(end):
    begin(end)
    die()

def next_one(end):
    say("next")
    die()

sys.exit(root.run(first, next_one))
"""
    assert run(code, status=1) == ["next"] * 10


def test_everything_ends_with_root():
    code = """
def only(end):
    begin(end)
    say(os.getpid())
    while True:
        end.pulse(time.monotonic())
        time.sleep(0.1)

sys.exit(root.run(only, only))
"""
    command = [sys.executable, "-c", PRELUDE + code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        supervisor = int(first.stdout.readline())
        first.kill()
        wait_until(lambda: not is_alive(supervisor), what="the end of the supervisor")
