"""Cells and wardens within one process. What needs processes that die is in tests/process/test_liveness.py."""

import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from everserve.memory.liveness import CELL_BYTES, ORCHESTRATOR_WORD, Cell, PeerState, Warden, life_word
from everserve.memory.liveness.cell import NUM_LIFE_WORDS, load
from everserve.native import BuildError
from everserve.tables.ids import MAX_RANKS
from tests.support.readable import is_readable

try:
    load()
except BuildError as e:
    pytest.skip(f"no liveness library: {e}", allow_module_level=True)

DEADLINE_S = 60.0
NEVER_MS = 1e7  # a detection time that no test lives to see


def new_cell() -> Cell:
    fd = os.memfd_create("cell")
    os.ftruncate(fd, CELL_BYTES)
    cell = Cell(fd)
    os.close(fd)
    return cell


@pytest.fixture
def cell() -> Iterator[Cell]:
    cell = new_cell()
    yield cell
    cell.close()


@pytest.fixture
def wardens() -> Iterator[Callable[..., Warden]]:
    """Makes wardens that have started, and stops them at the end."""
    made: list[Warden] = []

    def make(*args, **kwargs) -> Warden:
        made.append(Warden(*args, **kwargs))
        made[-1].start()
        return made[-1]

    yield make
    for warden in made:
        warden.stop()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# cells


def test_every_watcher_has_a_life_word_of_its_own():
    words = [life_word(rank, incarnation) for rank in range(MAX_RANKS) for incarnation in range(1, 5)]
    assert len({*words, ORCHESTRATOR_WORD}) == len(words) + 1
    assert all(0 <= word < NUM_LIFE_WORDS for word in words)
    assert life_word(5, 9) == life_word(5, 1), "the fifth process in a seat takes over the word of the first"
    with pytest.raises(AssertionError):
        life_word(MAX_RANKS, 1)


def test_two_mappings_are_one_cell():
    fd = os.memfd_create("cell")
    os.ftruncate(fd, CELL_BYTES)
    owner, peer = Cell(fd), Cell(fd)
    os.close(fd)
    assert (peer.doorbell, peer.control, peer.position, peer.progress, peer.idle, peer.pulse) == (0, 0, 0, 0, False, 0)
    owner.position, owner.idle = -1, True
    owner.advance()
    assert (peer.position, peer.idle, peer.progress) == (-1, True, 1)
    owner.position, owner.idle = 2**31 - 1, False
    assert (peer.position, peer.idle) == (2**31 - 1, False)
    peer.ring()
    peer.ring_control()
    assert (owner.doorbell, owner.control) == (2, 1)
    assert not any(owner.is_dead(word) for word in range(NUM_LIFE_WORDS))
    owner.close()
    peer.ring()
    assert peer.doorbell == 3
    peer.close()


def test_a_closed_cell_and_memory_that_is_too_small_are_refused(cell):
    fd = os.memfd_create("cell")
    os.ftruncate(fd, CELL_BYTES - 1)
    with pytest.raises(ValueError, match="bytes"):
        Cell(fd)
    os.close(fd)
    cell.close()
    for use in (cell.ring, lambda: cell.position, lambda: cell.doorbell, lambda: cell.wait(0, 0), cell.advance):
        with pytest.raises((AttributeError, ValueError, AssertionError)):
            use()


def test_waiting_ends_at_once_after_a_ring_and_with_the_time(cell):
    seen = cell.doorbell
    assert cell.wait(seen, 0.0) == seen
    assert cell.wait(seen, 0.001) == seen
    assert cell.wait(seen, 0.001, spin_us=100) == seen
    assert cell.wait(seen, 0.0001, spin_us=1e6) == seen, "spinning is part of the time"
    cell.ring()
    assert cell.wait(seen, math.inf) == seen + 1
    assert cell.wait(seen, math.inf, spin_us=100) == seen + 1


def test_a_signal_ends_a_wait_so_that_its_handler_runs(cell):
    arrived = []
    before = signal.signal(signal.SIGUSR1, lambda *_: arrived.append(True))
    main, done = threading.main_thread().ident, threading.Event()

    def interrupt() -> None:
        while not done.wait(0.001):
            signal.pthread_kill(main, signal.SIGUSR1)

    with ThreadPoolExecutor(1) as other:
        other.submit(interrupt)
        seen = cell.doorbell
        while not arrived:
            assert cell.wait(seen, math.inf) == seen
        done.set()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("spin_us", [0, 20])
def test_no_ring_is_lost_between_two_threads(spin_us):
    """Each rings the other once per turn and waits without limit: one lost ring, and both would sleep for ever."""
    cells, num_turns = (new_cell(), new_cell()), 20_000

    def play(own: Cell, other: Cell) -> None:
        seen = 0
        for _ in range(num_turns):
            other.ring()
            now = own.wait(seen, math.inf, spin_us)
            while now == seen:
                now = own.wait(seen, math.inf, spin_us)
            seen = seen + 1  # the other may be one ahead of us, never two

    players = [threading.Thread(target=play, args=pair, daemon=True) for pair in itertools.permutations(cells)]
    for player in players:
        player.start()
    for player in players:
        player.join(DEADLINE_S)
        assert not player.is_alive(), "a ring was lost"
    assert [cell.doorbell for cell in cells] == [num_turns, num_turns]
    for cell in cells:
        cell.close()


def test_no_ring_is_lost_among_many(cell):
    num_ringers, num_rings = 3, 4000

    def ring() -> None:
        for _ in range(num_rings):
            cell.ring()

    def count() -> None:
        seen = 0
        while seen < num_ringers * num_rings:
            seen = cell.wait(seen, math.inf)

    threads = [threading.Thread(target=f, daemon=True) for f in (count, *[ring] * num_ringers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


# wardens


def warden_threads() -> list[Path]:
    return [task for task in Path("/proc/self/task").iterdir() if name_of(task) == "warden"]


def name_of(task: Path) -> str | None:
    """None: some other thread, which has ended since it was listed."""
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None


def test_the_thread_starts_with_start_blocks_all_signals_and_ends_with_stop(cell):
    before = set(warden_threads())
    warden = Warden(cell, NEVER_MS)
    assert set(warden_threads()) == before and not warden.has_life_words
    warden.start()
    (thread,) = set(warden_threads()) - before
    blocked = next(line for line in (thread / "status").read_text().splitlines() if line.startswith("SigBlk"))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        assert int(blocked.split()[1], 16) >> (number - 1) & 1
    assert warden.has_life_words and cell.pulse == 1
    with pytest.raises(AssertionError, match="uses this cell"):
        cell.close()
    warden.stop()
    warden.stop()
    assert set(warden_threads()) == before and not warden.has_life_words
    assert not any(cell.is_dead(word) for word in range(NUM_LIFE_WORDS)), "it stopped, it did not die"


def test_who_loses_the_lease_falls_silent_and_comes_back(cell, wardens):
    own, watcher = wardens(cell, 50), wardens(None, 50)
    watcher.watch(7, cell, ORCHESTRATOR_WORD)
    assert watcher.state(7) is PeerState.ALIVE
    own.renew(3600)
    assert not cell.lease_is_over
    own.renew(0)
    wait_until(lambda: watcher.state(7) is PeerState.SILENT)
    pulse = cell.pulse
    assert cell.lease_is_over
    own.renew()  # as long as before: not at all
    own.renew(3600)
    wait_until(lambda: watcher.state(7) is PeerState.ALIVE)
    assert cell.pulse > pulse and not cell.lease_is_over
    assert watcher.changes()[:2] == [(7, PeerState.SILENT), (7, PeerState.ALIVE)]
    own.stop()
    wait_until(lambda: watcher.state(7) is PeerState.SILENT)


def test_a_peer_that_never_pulses_is_silent(cell, wardens):
    watcher = wardens(None, 5)
    watcher.watch(1, cell, 0)
    wait_until(lambda: watcher.state(1) is PeerState.SILENT)


def test_a_change_is_told_in_three_ways(cell, wardens):
    peer, event_fd = new_cell(), os.eventfd(0)
    warden = wardens(cell, 5, event_fd)
    seen, alarm = cell.doorbell, warden.alarm
    assert warden.changes() == []
    warden.watch(3, peer, 0)  # nobody is there
    assert cell.wait(seen, DEADLINE_S) == seen + 1
    assert is_readable(event_fd, DEADLINE_S) and os.eventfd_read(event_fd) == 1
    assert warden.alarm == alarm + 1 == int.from_bytes(load_uint32(warden.alarm_address), "little")
    assert warden.changes() == [(3, PeerState.SILENT)] and warden.changes() == []
    warden.unwatch(3)
    peer.close()
    os.close(event_fd)


def load_uint32(address: int) -> bytes:
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(4)


def test_a_peer_that_is_no_longer_watched_is_forgotten_and_its_memory_not_touched(cell, wardens):
    """Each peer's memory is unmapped as soon as unwatch returns: one late look, and the process is gone.

    Had the kernel been given an address that is no longer mapped, the warden would have turned to polling.
    """
    warden = wardens(cell, 0.05)  # it never rests
    for key in range(300):
        peer = new_cell()
        warden.watch(key, peer, key % NUM_LIFE_WORDS)
        with pytest.raises(AssertionError, match="uses this cell"):
            peer.close()
        if key % 10 == 0:
            wait_until(lambda key=key: warden.state(key) is PeerState.SILENT)
        warden.unwatch(key)
        peer.close()
        with pytest.raises(KeyError):
            warden.state(key)
        assert all(changed != key for changed, _ in warden.changes())
    with pytest.raises(KeyError):
        warden.unwatch(0)
    assert warden.uses_waitv == bool(load().brief.es_has_waitv())


def test_the_last_change_of_every_peer_is_kept_however_many_there_were(cell, wardens):
    own, watcher = wardens(cell, 5), wardens(None, 5)
    keys = range(120)
    for key in keys:
        watcher.watch(key, cell, key)
    with pytest.raises(ValueError, match="at most 120"):
        watcher.watch(120, cell, 120)
    with pytest.raises(AssertionError, match="watched already"):
        watcher.watch(0, cell, 0)
    for turn in range(11):  # 1320 changes, of which the warden keeps at most 1024
        own.renew(3600 if turn % 2 else 0)
        wanted = PeerState.ALIVE if turn % 2 else PeerState.SILENT
        wait_until(lambda wanted=wanted: {watcher.state(key) for key in keys} == {wanted})
    changes = watcher.changes()
    assert len(changes) < 1320
    assert dict(changes) == dict.fromkeys(keys, PeerState.SILENT)
