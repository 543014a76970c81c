"""Regaining KV that other workers keep, when heads have to be computed elsewhere than where their KV is.

Heads and their KV may be at other workers (seam/heads.py). When a device is lost, with the memory of its heads, or a
head moves to another worker, the new places fetch the KV from where it still is: a mirror, or the pool of the worker
that had the head. Streams wait meanwhile, and then go on where they were; what could not be found, or is not right, is
computed again. So nothing here can make a stream wrong, and at worst all of it is computed again.

The same is done when a worker was replaced by another process that has its memory: this is another pool until the KV of
the streams has been checked, and then nothing is copied but what was damaged and is right elsewhere.

A worker may use the slot, and the piece, of a head that routes do not lead to any more for another head, once all homes
have acknowledged these routes. So a home acknowledges routes after this (`Engine.regain`).

Blocks keep their numbers. A stream keeps its first tokens, up to the first one that is missing at any head. What is
only cached, and belongs to no running stream, is doubtful until a prompt has these tokens, with which it is checked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from everserve.engine.journal import Journal
from everserve.engine.precopying import MovableKv, Precopier
from everserve.engine.scheduler import Scheduler
from everserve.engine.sequence import Sequence as Stream
from everserve.errors import FetchFailed


class KvElsewhere(MovableKv, Protocol):
    """The KV of all heads, which other workers keep (backends/cpu/head_kv.py). Asked between two steps."""

    @property
    def num_fetched_bytes(self) -> int:
        """So far."""

    @property
    def is_displaced(self) -> bool:
        """Whether heads would be asked where their KV is not. One that has no place is not displaced yet."""

    def look(self) -> None:
        """Which heads are displaced, and where they will be asked from now on. StepAbandoned if a worker there is
        missing."""

    def fetch(self, blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        """Have the first tokens of a stream where displaced heads will be asked. How many are right in all of them.
        Raises FetchFailed, or StepAbandoned: then `look` again."""

    def settle(self) -> None:
        """From now on heads are asked there."""

    def forget(self) -> None:
        """No KV is in use any more: heads may be asked anywhere."""


@dataclass(frozen=True)
class Regained:
    """What became of the KV of running streams."""

    num_streams: int
    num_kept: int  # tokens
    num_lost: int  # tokens, which are computed again
    num_bytes: int  # that were copied
    took_s: float
    preempted: list[Stream]  # streams of which nothing is left


class Regainer:
    """For one engine. Without a journal words have no chains: everything is computed again. Heads that can stay where
    they are until their KV has been copied do so (precopying.py)."""

    def __init__(
        self, kv: KvElsewhere, scheduler: Scheduler, journal: Journal | None, clock: Callable[[], float]
    ) -> None:
        self._kv = kv
        self._scheduler = scheduler
        self._journal = journal
        self._clock = clock
        self._precopier = Precopier(kv, scheduler) if journal is not None else None
        self._num_bytes_told = 0
        self.num_kept = self.num_lost = self.num_bytes = 0  # in all

    def regain(self) -> Regained | None:
        """Between two steps. None if nothing is displaced. If it raises StepAbandoned nothing has happened yet."""
        began_s, running = self._clock(), list(self._scheduler.running)
        before = sum(sequence.num_computed for sequence in running)
        if self._kv.is_displaced:
            if self._precopier is not None:
                self._precopier.forget()
            num_right = self._fetch(running)
        elif (moved := self._move(running)) is not None:
            num_right = moved
        else:
            return None
        preempted, cut = self._scheduler.keep_kv(num_right)
        if self._journal is not None:
            self._journal.clear(preempted)
            self._journal.cut(cut)
        num_kept = sum(sequence.num_computed for sequence in running)
        num_bytes, self._num_bytes_told = self._kv.num_fetched_bytes - self._num_bytes_told, self._kv.num_fetched_bytes
        self.num_kept += num_kept
        self.num_lost += before - num_kept
        self.num_bytes += num_bytes
        return Regained(len(running), num_kept, before - num_kept, num_bytes, self._clock() - began_s, preempted)

    def _move(self, running: Sequence[Stream]) -> dict[str, int] | None:
        """A little of what heads take along that move; by stream, how many tokens are there, if that is all."""
        if self._precopier is None or not self._kv.is_moving:
            return None
        if not running:
            self._kv.forget()
            return {}
        num_right = self._precopier.advance()
        if num_right is not None:
            self._kv.settle()
            self._precopier.forget()
        return num_right

    def _fetch(self, running: Sequence[Stream]) -> dict[str, int]:
        """Fetches. Returns, by stream, how many leading tokens are where they will be needed."""
        kv, journal = self._kv, self._journal
        if journal is None or not running:
            kv.forget()
            return {}
        journal.settle()
        num_right: dict[str, int] = {}
        try:
            kv.look()
            for sequence in running:
                num_tokens = sequence.num_computed
                chains = sequence.chains(num_tokens)
                num_right[sequence.id] = kv.fetch(sequence.blocks, num_tokens, chains) if num_tokens else 0
            kv.settle()
        except FetchFailed:
            kv.forget()
            return {}
        return num_right
