"""Processes that die, stop and come back, as seen by the wardens of others.

NEVER_MS is a detection time that no test lives to see: who is found dead under it was reported by the kernel.
"""

import contextlib
import ctypes
import math
import mmap
import os
import platform
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everserve.memory.liveness import CELL_BYTES, ORCHESTRATOR_WORD, Cell, PeerState, Warden, life_word
from everserve.memory.liveness.cell import NUM_LIFE_WORDS, load
from everserve.native import BuildError
from tests.support.readable import is_readable

try:
    load()
except BuildError as e:
    pytest.skip(f"no liveness library: {e}", allow_module_level=True)

DEADLINE_S = 60.0
NEVER_MS = 1e7
HAS_WAITV = bool(load().brief.es_has_waitv())
ways_to_wait = pytest.mark.parametrize(
    "use_waitv",
    [pytest.param(True, marks=pytest.mark.skipif(not HAS_WAITV, reason="no futex_waitv")), False],
    ids=["waitv", "polling"],
)


class Child:
    """A forked process with a cell. It runs `body(child)` and exits with 0 if that returns."""

    def __init__(self, body: Callable[["Child"], None]) -> None:
        self.fd = os.memfd_create("cell")
        os.ftruncate(self.fd, CELL_BYTES)
        self.cell = Cell(self.fd)
        self._read_fd, self._write_fd = os.pipe()
        self._reaped = False
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._read_fd)
                body(self)
                status = 0
            finally:
                os._exit(status)
        os.close(self._write_fd)

    def say(self, line: str) -> None:
        """In the child: tell the parent."""
        os.write(self._write_fd, line.encode() + b"\n")

    def hear(self) -> str:
        """In the parent: the next line; empty at the end."""
        line = b""
        while not line.endswith(b"\n"):
            assert is_readable(self._read_fd, DEADLINE_S), "nothing heard from the child"
            byte = os.read(self._read_fd, 1)
            if not byte:
                break
            line += byte
        return line.decode().strip()

    def kill(self) -> None:
        """SIGKILL, and see that it landed."""
        os.kill(self.pid, signal.SIGKILL)
        assert os.WTERMSIG(self.reap()) == signal.SIGKILL

    def stop(self) -> None:
        """SIGSTOP, and see that it landed."""
        os.kill(self.pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def reap(self) -> int:
        self._reaped = True
        return os.waitpid(self.pid, 0)[1]

    def close(self) -> None:
        if not self._reaped:
            os.kill(self.pid, signal.SIGKILL)
            self.reap()
        self.cell.close()
        os.close(self.fd)
        os.close(self._read_fd)


@pytest.fixture
def fork() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def make(body: Callable[[Child], None]) -> Child:
        children.append(Child(body))
        return children[-1]

    yield make
    for child in children:
        child.close()


@pytest.fixture
def wardens(fork) -> Iterator[Callable[..., Warden]]:
    """Makes wardens that have started, and stops them before the cells are closed."""
    made: list[Warden] = []

    def make(*args, **kwargs) -> Warden:
        made.append(Warden(*args, **kwargs))
        made[-1].start()
        return made[-1]

    yield make
    for warden in made:
        warden.stop()


def peer(detect_ms: float = NEVER_MS, before: Callable[[], object] | None = None) -> Callable[[Child], None]:
    """What an ordinary child does: start a warden, say so, and live."""

    def body(child: Child) -> None:
        kept = before() if before else None
        warden = Warden(child.cell, detect_ms)
        warden.start()
        child.say(f"ready {warden.has_life_words}")
        signal.pause()
        del kept

    return body


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def await_state(warden: Warden, key: int, state: PeerState) -> None:
    wait_until(lambda: warden.state(key) is state)


# death


@ways_to_wait
def test_a_killed_process_has_died(fork, wardens, use_waitv):
    victim, bystander = fork(peer()), fork(peer())
    assert victim.hear() == bystander.hear() == "ready True"
    event_fd = os.eventfd(0)
    warden = wardens(None, NEVER_MS, event_fd, use_waitv=use_waitv)
    assert warden.uses_waitv == use_waitv
    warden.watch(0, victim.cell, ORCHESTRATOR_WORD)
    warden.watch(1, bystander.cell, ORCHESTRATOR_WORD)
    os.kill(victim.pid, signal.SIGKILL)
    assert is_readable(event_fd, DEADLINE_S), "nobody noticed"
    assert warden.changes() == [(0, PeerState.DIED)]
    assert (warden.state(0), warden.state(1)) == (PeerState.DIED, PeerState.ALIVE)
    assert os.WTERMSIG(victim.reap()) == signal.SIGKILL
    warden.stop()
    os.close(event_fd)


def test_who_watches_a_dead_process_is_told_at_once(fork, wardens):
    victim = fork(peer())
    victim.hear()
    victim.kill()
    warden = wardens(None, NEVER_MS)
    warden.watch(0, victim.cell, 0)
    await_state(warden, 0, PeerState.DIED)


@pytest.mark.parametrize(
    "end",
    ["pass", "sys.exit(3)", "1 / 0", "os._exit(0)", "os.abort()", "os.kill(os.getpid(), signal.SIGTERM)"],
    ids=["return", "sys.exit", "exception", "_exit", "abort", "SIGTERM"],
)
def test_every_way_to_end_is_a_death(wardens, end):
    """In a process of its own, whose interpreter shuts down while the warden runs."""
    fd = os.memfd_create("cell")
    os.ftruncate(fd, CELL_BYTES)
    cell = Cell(fd)
    code = f"""
import os, signal, sys
from everserve.memory.liveness import Cell, Warden
Warden(Cell({fd}), {NEVER_MS}).start()
print("ready", flush=True)
sys.stdin.read()
{end}
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        warden = wardens(None, NEVER_MS)
        warden.watch(0, cell, life_word(3, 1))
        assert warden.state(0) is PeerState.ALIVE and process.poll() is None
        process.stdin.close()
        await_state(warden, 0, PeerState.DIED)
        process.wait(DEADLINE_S)
    warden.stop()
    cell.close()
    os.close(fd)


@ways_to_wait
def test_all_watchers_notice(fork, use_waitv):
    victim = fork(peer())
    victim.hear()

    def watch_as(rank: int) -> Callable[[Child], None]:
        def body(child: Child) -> None:
            warden = Warden(child.cell, NEVER_MS, use_waitv=use_waitv)
            warden.start()
            warden.watch(100, victim.cell, life_word(rank, 1))
            seen = child.cell.doorbell
            child.say(warden.state(100).name)
            while not (changes := warden.changes()):
                seen = child.cell.wait(seen, math.inf)
            child.say(str([(key, state.name) for key, state in changes]))

        return body

    watchers = [fork(watch_as(rank)) for rank in range(4)]
    assert [watcher.hear() for watcher in watchers] == ["ALIVE"] * 4
    victim.kill()
    assert [watcher.hear() for watcher in watchers] == ["[(100, 'DIED')]"] * 4


def test_death_is_known_before_the_sockets_of_a_large_process_close(fork):
    def touch() -> mmap.mmap:
        memory = mmap.mmap(-1, 128 << 20)
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1
        return memory

    victim = fork(peer(before=touch))
    victim.hear()
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.hear() == "", "the end of the pipe"
    assert all(victim.cell.is_dead(word) for word in range(NUM_LIFE_WORDS))


def test_whenever_a_process_is_killed_no_life_word_is_left_unmarked():
    """Killed at random while it takes and releases its words: each is free, or marked."""

    def start_and_stop(child: Child) -> None:
        child.say("ready")
        while True:
            warden = Warden(child.cell, NEVER_MS)
            warden.start()
            warden.stop()

    rng, num_marked, deadline = random.Random(0), 0, time.monotonic() + DEADLINE_S
    while num_marked < 20:  # the other kills come between two wardens
        with contextlib.closing(Child(start_and_stop)) as victim:
            victim.hear()
            time.sleep(rng.uniform(0, 0.002))
            victim.kill()
            entries = os.pread(victim.fd, CELL_BYTES, 0)[-16 * NUM_LIFE_WORDS :]
            words = [word for word, _ in struct.iter_unpack("8xII", entries)]
            assert all(word == 0 or victim.cell.is_dead(index) for index, word in enumerate(words)), words
            num_marked += any(words)
        assert time.monotonic() < deadline


# silence


@ways_to_wait
def test_a_stopped_process_is_silent_until_it_goes_on(fork, wardens, use_waitv):
    detect_ms = 50
    victim = fork(peer(detect_ms))
    victim.hear()
    warden = wardens(None, detect_ms, use_waitv=use_waitv)
    warden.watch(0, victim.cell, ORCHESTRATOR_WORD)
    for _ in range(2):
        victim.stop()
        await_state(warden, 0, PeerState.SILENT)
        victim.resume()
        await_state(warden, 0, PeerState.ALIVE)
    victim.stop()
    await_state(warden, 0, PeerState.SILENT)
    victim.kill()
    await_state(warden, 0, PeerState.DIED)
    states = [state for _, state in warden.changes()]
    assert states[-2:] == [PeerState.SILENT, PeerState.DIED] and PeerState.ALIVE in states


def test_a_peer_that_waits_for_a_core_is_silent_long_after_one_that_is_stopped(fork, wardens):
    """Threads that should pulse, and do not: they could run, unless they are stopped, sooner or later."""
    owner_at = 3 * 64 + 12  # csrc/cell.h

    def spin(child: Child) -> None:
        os.pwrite(child.fd, struct.pack("II", os.getpid(), threading.get_native_id()), owner_at)
        child.say("ready")
        while True:
            pass

    starved, stopped, stopped_later = fork(spin), fork(spin), fork(spin)
    assert starved.hear() == stopped.hear() == stopped_later.hear() == "ready"
    stopped.stop()
    event_fd, detect_ms = os.eventfd(0), 200
    warden = wardens(None, detect_ms, event_fd)
    began_s = time.monotonic()
    for key, child in enumerate((starved, stopped, stopped_later)):
        warden.watch(key, child.cell, 0)
    assert is_readable(event_fd, DEADLINE_S)
    assert warden.changes() == [(1, PeerState.SILENT)], "the one that is stopped"
    stopped_later.stop()
    await_state(warden, 0, PeerState.SILENT)
    assert time.monotonic() - began_s > 9 * detect_ms / 1e3, "ten times as long"
    assert warden.changes() == [(2, PeerState.SILENT), (0, PeerState.SILENT)], "each look asks for the state"
    warden.stop()
    os.close(event_fd)


def test_who_is_held_up_itself_does_not_take_its_peers_for_silent(fork):
    """A machine that freezes again and again. The watcher gets to look in between, its peer does not get to pulse."""
    detect_ms = 500
    other = fork(peer(detect_ms))
    other.hear()

    def watch(child: Child) -> None:
        warden = Warden(child.cell, detect_ms)
        warden.start()
        warden.watch(0, other.cell, 0)
        child.say("ready")
        while child.cell.control == 0:
            child.cell.wait(child.cell.doorbell, 0.01)
        child.say(str(warden.changes()))
        await_state(warden, 0, PeerState.SILENT)
        child.say("silent")

    watcher = fork(watch)
    watcher.hear()
    other.stop()
    for _ in range(8):  # looks; five are enough when they are timely
        watcher.stop()
        pulse = watcher.cell.pulse
        time.sleep(2.2 * detect_ms / 5 / 1e3)  # more than two periods
        watcher.resume()
        wait_until(lambda pulse=pulse: watcher.cell.pulse > pulse)
    other.resume()
    watcher.cell.ring_control()
    assert watcher.hear() == "[]"
    other.stop()
    assert watcher.hear() == "silent", "it was watching"


def refuse_system_calls(numbers: list[int]) -> None:
    """From now on these do not exist (ENOSYS) for this process: a seccomp filter, as a container would set one."""
    load_number, jump_if_equal, give = 0x20, 0x15, 0x06
    allow, enosys = 0x7FFF0000, 0x00050000 | 38
    program = [(load_number, 0, 0, 0)]
    program += [(jump_if_equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(give, 0, 0, allow), (give, 0, 0, enosys)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    description = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, description, 0, 0) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.skipif(platform.machine() not in ("aarch64", "x86_64"), reason="system calls have other numbers here")
def test_a_kernel_without_robust_lists_and_waitv_leaves_pulses(fork, wardens):
    set_robust_list, futex_waitv, detect_ms = {"aarch64": 99, "x86_64": 273}[platform.machine()], 449, 50

    def body(child: Child) -> None:
        refuse_system_calls([set_robust_list, futex_waitv])
        warden = Warden(child.cell, detect_ms)
        warden.start()
        child.say(f"{warden.has_life_words} {warden.uses_waitv}")
        try:
            Warden(None, detect_ms, use_waitv=True)
        except OSError as e:
            child.say(str(e))
        signal.pause()

    victim = fork(body)
    assert victim.hear() == "False False"
    assert victim.hear() == "this kernel has no futex_waitv"
    warden = wardens(None, detect_ms)
    warden.watch(0, victim.cell, 0)
    pulse = victim.cell.pulse
    wait_until(lambda: victim.cell.pulse > pulse)
    victim.kill()
    await_state(warden, 0, PeerState.SILENT)
    assert not victim.cell.is_dead(0)


# forks and rings


def test_the_child_of_a_fork_has_no_part_in_its_parents_warden(fork):
    def body(child: Child) -> None:
        warden = Warden(child.cell, 50)
        warden.start()
        warden.watch(0, child.cell, 0)
        pid = os.fork()
        if pid == 0:
            assert not warden.has_life_words and len(list(Path("/proc/self/task").iterdir())) == 1
            for use in (warden.start, warden.changes, lambda: warden.state(0), lambda: warden.unwatch(0)):
                try:
                    use()
                except AssertionError:
                    continue
                os._exit(1)
            warden.stop()
            fd = os.memfd_create("cell")
            os.ftruncate(fd, CELL_BYTES)
            own = Warden(Cell(fd), 50)
            own.start()
            os._exit(0 if own.has_life_words else 2)
        child.say(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        pulse = child.cell.pulse
        wait_until(lambda: child.cell.pulse > pulse)
        child.say(f"{warden.has_life_words} {child.cell.is_dead(0)}")
        signal.pause()

    parent = fork(body)
    assert parent.hear() == "0"
    assert parent.hear() == "True False"
    parent.kill()
    assert parent.cell.is_dead(0)


def test_no_ring_is_lost_between_two_processes(fork):
    """Each rings the other once per turn and waits without limit: one lost ring, and both would sleep for ever."""
    num_turns = 20_000

    def play(own: Cell, other: Cell) -> None:
        for turn in range(num_turns):
            other.ring()
            while own.wait(turn, math.inf) == turn:
                pass

    first_fd = os.memfd_create("cell")
    os.ftruncate(first_fd, CELL_BYTES)
    first = Cell(first_fd)
    second = fork(lambda child: play(child.cell, first))
    third = fork(lambda child: play(first, second.cell))
    assert second.hear() == third.hear() == "", "both came to the end"
    assert second.reap() == third.reap() == 0
    assert (first.doorbell, second.cell.doorbell) == (num_turns, num_turns)
    first.close()
    os.close(first_fd)
