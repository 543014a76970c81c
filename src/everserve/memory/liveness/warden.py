"""The warden: a thread (in C) that shows that this process lives, and watches its peers.

    warden = Warden(own_cell, detect_ms=50)     no thread yet: a zygote may fork
    warden.start()                              takes the life words, begins the pulse
    warden.watch(key, peer_cell, life_word(rank, incarnation))      the watcher's own rank and incarnation
    ... when `alarm` has changed: warden.changes()
    warden.unwatch(key); peer_cell.close()

How the three states follow from each other is drawn in csrc/warden.c. A change advances `alarm`, rings the own cell
and writes to `event_fd`: a thread that waits on any of the three wakes up.

A peer whose thread is not stopped, but only waits for a core, is SILENT after ten times detect_ms. One that has not
started its warden is SILENT after detect_ms, and one that stops its warden in order falls SILENT too. One that ends, by
whatever cause, while its warden runs has DIED. All wardens of a cluster must be given the same detect_ms.
"""

import ctypes
import os
from enum import Enum

from everserve.memory.liveness.cell import NUM_LIFE_WORDS, Cell, load, words_at
from everserve.native.structs import source

PERIODS_PER_DETECTION = 5  # NUM_STILL_LOOKS in csrc/warden.c
MAX_PEERS = 120  # csrc/warden.h
_MAX_CHANGES = 1024  # csrc/warden.h

_c = source("liveness", "liveness.c")
_warden_args = _c.packer("warden_args").pack
_watch_args = _c.packer("watch_args").pack
_key_args = _c.packer("key_args").pack


class PeerState(Enum):
    """What this process has seen of a peer. The drawing is in csrc/warden.c."""

    ALIVE = 0
    SILENT = 1  # stopped, stuck, or starved for long; may come back
    DIED = 2  # its process has ended; final


class Warden:
    """Belongs to the process that made it. In the child of a fork only `stop` may be called, which forgets it.

    `use_waitv`: whether to wait for all peers at once (futex_waitv, Linux 5.16); by default where the kernel can. The
    other way is to look at their life words every millisecond.
    """

    def __init__(
        self, cell: Cell | None, detect_ms: float, event_fd: int | None = None, *, use_waitv: bool | None = None
    ) -> None:
        assert detect_ms > 0
        self._lib = load()
        self._pid = os.getpid()
        self._cell = cell
        self._cells: dict[int, Cell] = {}  # of the peers, by key
        self._started = self._running = False
        has_waitv = bool(self._lib.brief.es_has_waitv())
        if use_waitv and not has_waitv:
            raise OSError("this kernel has no futex_waitv")
        period_ns = round(detect_ms * 1e6 / PERIODS_PER_DETECTION)
        fd = -1 if event_fd is None else event_fd
        self._handle: int = self._lib.brief.es_warden_new(
            _warden_args(cell.address if cell else 0, period_ns, fd, has_waitv if use_waitv is None else use_waitv)
        )
        if not self._handle:
            raise MemoryError
        self.alarm_address: int = self._lib.brief.es_warden_alarm(self._handle)  # good for as long as the process
        self._alarm = words_at(self.alarm_address, 4, "I")
        self._lease = words_at(self._lib.brief.es_warden_lease(self._handle), 16, "q")
        self._changes = (ctypes.c_int64 * (2 * _MAX_CHANGES))()  # key, state, key, state, ...
        self._changes_args = _c.packer("changes_args").pack(self._handle, ctypes.addressof(self._changes))

    def start(self) -> None:
        """Start the thread; when this returns, the life words are taken and the pulse has begun."""
        assert not self._started and self._is_mine(), "a warden starts once, in the process that made it"
        error = self._lib.blocking.es_warden_start(self._handle)
        if error:
            raise OSError(error, os.strerror(error))
        self._started = self._running = True
        if self._cell:
            self._cell.num_wardens += 1

    def stop(self) -> None:
        """End the thread and let go of the life words and of all cells. Peers will see silence, not death."""
        if self._running:
            if self._is_mine():  # the child of a fork has no such thread
                self._lib.blocking.es_warden_stop(self._handle)
            if self._cell:
                self._cell.num_wardens -= 1
        self._running = False
        for cell in self._cells.values():
            cell.num_wardens -= 1
        self._cells.clear()

    @property
    def has_life_words(self) -> bool:
        """Whether the kernel will tell peers of this process's death. If not, all they will see is its silence."""
        return bool(self._lib.brief.es_warden_holds_life_words(self._handle)) and self._is_mine()

    @property
    def uses_waitv(self) -> bool:
        """Whether a peer's death wakes the thread; else it finds out within a millisecond."""
        return bool(self._lib.brief.es_warden_uses_waitv(self._handle))

    # The main thread's lease

    def renew(self, seconds: float | None = None) -> None:
        """Renew the main thread's lease: the pulse goes on for so long from now (None: as long as last time), and stops
        if this is not renewed. Time in which this process hardly runs does not count (csrc/warden.c).

        Before the first call it has no end.
        """
        lease = self._lease  # two aligned stores: if C sees only one of them, the other shows a period later
        if seconds is not None:
            lease[0] = int(seconds * 1e9)
        lease[1] += 1

    # Peers

    def watch(self, key: int, cell: Cell, word: int) -> None:
        """Watch the owner of `cell`. `word` is the life word that belongs to this process: see `life_word`."""
        assert self._is_mine() and 0 <= word < NUM_LIFE_WORDS
        assert key not in self._cells, f"peer {key} is watched already"
        if not self._lib.blocking.es_warden_watch(_watch_args(self._handle, key, cell.address, word)):
            raise ValueError(f"a warden watches at most {MAX_PEERS} peers")
        self._cells[key] = cell
        cell.num_wardens += 1

    def unwatch(self, key: int) -> None:
        """Forget a peer and its changes that were not read yet. When this returns, its cell may be closed."""
        assert self._is_mine()
        cell = self._cells.pop(key)
        self._lib.blocking.es_warden_unwatch(_key_args(self._handle, key))
        cell.num_wardens -= 1

    def state(self, key: int) -> PeerState:
        """What was seen last of a peer."""
        assert self._is_mine()
        state = self._lib.blocking.es_warden_state(_key_args(self._handle, key))
        if state < 0:
            raise KeyError(key)
        return PeerState(state)

    def changes(self) -> list[tuple[int, PeerState]]:
        """New states of peers since the last call, in order.

        If this is not called for very long, only the last change of each peer is kept.
        """
        assert self._is_mine()
        count = 2 * self._lib.blocking.es_warden_changes(self._changes_args)
        keys_and_states = self._changes[:count]
        return [(key, PeerState(state)) for key, state in zip(keys_and_states[::2], keys_and_states[1::2], strict=True)]

    @property
    def alarm(self) -> int:
        """How often a peer changed its state, modulo 2**32."""
        return self._alarm[0]

    def _is_mine(self) -> bool:
        return self._pid == os.getpid()
