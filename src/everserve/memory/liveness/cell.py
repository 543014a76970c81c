"""A worker's cell: shared memory in which peers ring it, and see whether it lives and how far it has come.

The anchor makes one for each incarnation, CELL_BYTES of zeros, and passes its descriptor; csrc/cell.h has the layout.

A message to the owner is: write it where it belongs, then ring. The owner waits like this:

    seen = cell.doorbell
    while True:
        do whatever has arrived
        seen = cell.wait(seen, timeout_s)       # returns at once if it rang since `seen` was read

Words with one writer that only inform (position, progress, idle, pulse, lease_over) are read and written in place
through a memoryview, without a call into C. That is safe: they are aligned, so the one load or store of 4 or 8 bytes
that memoryview does is never torn, and nothing else is concluded from their values, so no order is needed. What orders
other memory (doorbell, control, ring, wait) is an atomic operation in C.
"""

import ctypes
import functools
import os
from typing import Any

from everserve.native import BuildError, library
from everserve.native.structs import source
from everserve.procs import process
from everserve.tables.ids import MAX_RANKS

NUM_LIFE_WORDS = 4 * MAX_RANKS + 4  # csrc/cell.h
CELL_BYTES = 4 * 64 + 16 * NUM_LIFE_WORDS
ORCHESTRATOR_WORD = 4 * MAX_RANKS  # behind those of all seats
_OWNER_DIED = 1 << 30  # FUTEX_OWNER_DIED in linux/futex.h

# Where the words are, counted in words of their size.
_c = source("liveness", "cell.h")
_POSITION, _PROGRESS, _IDLE = (_c.offset("cell", name) // 4 for name in ("position", "progress", "idle"))
_PULSE = _c.offset("cell", "pulse") // 8
_LEASE_OVER, _OWNER_PID, _LETTER = (_c.offset("cell", name) // 4 for name in ("lease_over", "owner_pid", "letter"))
_FIRST_LIFE_WORD = (_c.offset("cell", "life") + _c.offset("life", "word")) // 4
_LIFE_WORD_STRIDE = _c.struct("life").size // 4

_wait_args = source("liveness", "liveness.c").packer("wait_args").pack


def life_word(rank: int, incarnation: int) -> int:
    """The life word, in every peer's cell, for the watcher in that seat: the kernel wakes one waiter per word."""
    assert 0 <= rank < MAX_RANKS, f"rank {rank} has no life word of its own"
    return rank + MAX_RANKS * (incarnation % 4)


class Library:
    """The functions in csrc/liveness.c."""

    def __init__(self) -> None:
        path = str(library("liveness"))
        try:
            self.blocking = ctypes.CDLL(path)  # gives up the interpreter's lock around a call
            self.brief = ctypes.PyDLL(path)  # keeps it: nothing here waits, and getting it back may take milliseconds
        except OSError as e:
            raise BuildError(f"cannot load the liveness library: {e}") from e
        pointer, packed, int64, uint32 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint32
        signatures: list[tuple[Any, Any, Any]] = [
            (self.brief.es_cell_map, int64, int64),
            (self.brief.es_cell_unmap, pointer, None),
            (self.brief.es_cell_doorbell, pointer, uint32),
            (self.brief.es_cell_control, pointer, uint32),
            (self.brief.es_cell_ring, pointer, None),
            (self.brief.es_cell_ring_control, pointer, None),
            (self.brief.es_cell_mark_dead, pointer, None),
            (self.blocking.es_cell_wait, packed, uint32),
            (self.brief.es_warden_new, packed, pointer),
            (self.brief.es_warden_alarm, pointer, pointer),
            (self.brief.es_warden_lease, pointer, pointer),
            (self.brief.es_warden_uses_waitv, pointer, int64),
            (self.brief.es_warden_holds_life_words, pointer, int64),
            (self.blocking.es_warden_start, pointer, int64),
            (self.blocking.es_warden_stop, pointer, None),
            (self.blocking.es_warden_watch, packed, int64),
            (self.blocking.es_warden_unwatch, packed, None),
            (self.blocking.es_warden_state, packed, int64),
            (self.blocking.es_warden_changes, packed, int64),
        ]
        for function, argument, result in signatures:
            function.argtypes, function.restype = [argument], result
        self.brief.es_cell_bytes.restype = self.brief.es_has_waitv.restype = int64
        assert self.brief.es_cell_bytes() == CELL_BYTES


@functools.cache
def load() -> Library:
    """Compiled on first use. No thread starts, and a fork inherits it."""
    return Library()


def words_at(address: int, num_bytes: int, code: str) -> memoryview:
    """Memory as a sequence of words; `code` as in struct."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B").cast(code)  # type: ignore[call-overload, no-any-return]


class Cell:
    """A mapping of a cell, the own one or a peer's. The descriptor stays the caller's, and may be closed.

    Mapped until `close`, and not just until the object is collected: the warden thread has no references.
    """

    def __init__(self, fd: int) -> None:
        if os.fstat(fd).st_size < CELL_BYTES:
            raise ValueError(f"a cell has {CELL_BYTES} bytes, this memory has {os.fstat(fd).st_size}")
        lib = load()
        address = lib.brief.es_cell_map(fd)
        if address < 0:
            raise OSError(-address, os.strerror(-address))
        self.address: int = address
        self.num_wardens = 0  # that use it
        self._closed = False
        self._pointer = ctypes.c_void_p(address)
        self._uint32 = words_at(address, CELL_BYTES, "I")
        self._int32 = words_at(address, CELL_BYTES, "i")
        self._uint64 = words_at(address, CELL_BYTES, "Q")
        self._doorbell = lib.brief.es_cell_doorbell
        self._control = lib.brief.es_cell_control
        self._ring = lib.brief.es_cell_ring
        self._ring_control = lib.brief.es_cell_ring_control
        self._wait = lib.blocking.es_cell_wait

    def close(self) -> None:
        """Unmap it. What is called afterwards fails; a second close does nothing."""
        assert self.num_wardens == 0, "a warden uses this cell"
        if not self._closed:
            self._closed = True
            load().brief.es_cell_unmap(self._pointer)
            del self.address, self._pointer
            for words in (self._uint32, self._int32, self._uint64):
                words.release()

    # For any process that maps the cell

    def ring(self) -> None:
        """Wake the owner, or keep it from falling asleep. An owner that sees the ring sees all writes before it."""
        self._ring(self._pointer)

    def ring_control(self) -> None:
        """Ring, and count a control message that has just been sent to the owner's socket."""
        self._ring_control(self._pointer)

    @property
    def pulse(self) -> int:
        """One more every period of the owner's warden."""
        return self._uint64[_PULSE]

    @property
    def lease_is_over(self) -> bool:
        """The owner's warden runs, and does not pulse because the main thread has been away for too long."""
        return bool(self._uint32[_LEASE_OVER])

    @property
    def is_starved(self) -> bool:
        """The owner's main thread waits for a core, as far as this host's kernel knows."""
        pid = self._uint32[_OWNER_PID]
        return pid != 0 and process.state_of(pid) == "R"

    @property
    def letter(self) -> str | None:
        """The state of a process on another host, as ps shows it there; None if that was not said."""
        return chr(self._uint32[_LETTER]) if self._uint32[_LETTER] else None

    def is_dead(self, word: int) -> bool:
        """Whether the kernel has marked the owner as dead in that life word."""
        assert 0 <= word < NUM_LIFE_WORDS
        return bool(self._uint32[_FIRST_LIFE_WORD + _LIFE_WORD_STRIDE * word] & _OWNER_DIED)

    # The carrier, in place of an owner on another host

    def copy_pulse(self, pulse: int, lease_is_over: bool, letter: str | None) -> None:
        """The owner's cell says so."""
        self._uint32[_LEASE_OVER] = lease_is_over
        self.say_letter(letter)
        self._uint64[_PULSE] = pulse

    def say_letter(self, letter: str | None) -> None:
        self._uint32[_LETTER] = ord(letter) if letter is not None else 0

    def mark_dead(self) -> None:
        """The owner's kernel has marked its life words: mark ours, and wake who watches them."""
        load().brief.es_cell_mark_dead(self._pointer)

    # The owner

    @property
    def doorbell(self) -> int:
        """How often it was rung, modulo 2**32. Read it before looking for work, to wait for what comes later."""
        return self._doorbell(self._pointer)  # type: ignore[no-any-return]

    def wait(self, seen: int, timeout_s: float, spin_us: float = 0) -> int:
        """Wait until the doorbell is no longer `seen`, spinning first; the doorbell as it is then.

        That may still be `seen`: when the time is over (math.inf: no limit), and after a signal.
        """
        return self._wait(_wait_args(self.address, seen, timeout_s, spin_us))  # type: ignore[no-any-return]

    @property
    def control(self) -> int:
        """How many control messages have been sent to the owner's socket, modulo 2**32."""
        return self._control(self._pointer)  # type: ignore[no-any-return]

    # Written by the owner, read by peers

    @property
    def position(self) -> int:
        """The layer that the owner is about to send, or -1 between steps."""
        return self._int32[_POSITION]

    @position.setter
    def position(self, layer: int) -> None:
        self._int32[_POSITION] = layer

    @property
    def progress(self) -> int:
        """Turns of the owner's loop, modulo 2**32."""
        return self._uint32[_PROGRESS]

    def advance(self) -> None:
        """One more turn."""
        words = self._uint32
        words[_PROGRESS] = (words[_PROGRESS] + 1) & 0xFFFFFFFF

    @property
    def idle(self) -> bool:
        """Whether the owner blocks for work."""
        return bool(self._uint32[_IDLE])

    @idle.setter
    def idle(self, idle: bool) -> None:
        self._uint32[_IDLE] = idle
