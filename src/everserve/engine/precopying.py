"""Moving heads to other workers without a pause: their KV is copied there beside the steps, and then the home switches.

    routes prefer another worker for a head      the worker that has its KV is still asked, as long as routes name it
    between any two steps                        the next blocks of a running stream are asked for, without waiting
    all but the last blocks are there            these are fetched too, while streams wait, and heads are asked there

KV is only appended to, so this converges. What was copied was verified on arrival (memory/pieces/sources.py), and the
blocks of a stream are written by its home alone: it is counted until the stream loses a block, or the target changes.
If anything fails, nothing has happened: the next step goes on where it was, and KV is copied again, some steps later.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from everserve.engine.scheduler import Scheduler
from everserve.engine.sequence import Sequence as Stream
from everserve.errors import FetchFailed, StepAbandoned

_LONGEST_REST = 256  # steps, after many failures
_TO_RUN_AHEAD = 4  # a part has so many times the tokens that streams get in one step: else it would never end


class MovableKv(Protocol):
    """The KV of all heads, at other workers (backends/cpu/head_kv.py)."""

    @property
    def is_moving(self) -> bool:
        """Whether routes prefer other workers for heads than those that have their KV, and all of them are there."""

    def aim(self) -> bytes:
        """At these workers, from now on: `begin_fetch` and `fetch` are about the heads that move. What the target is:
        the workers, and their pools. Raises StepAbandoned or FetchFailed."""

    def num_at_once(self, num_tokens: int) -> int:
        """How many blocks to ask for at once, at least so many tokens if there is room."""

    def begin_fetch(self, blocks: Sequence[int], chains: NDArray[np.uint64]) -> bool:
        """Ask for these tokens in these blocks, without waiting. Whether that was possible."""

    def poll_fetch(self) -> int | None:
        """How many of the tokens asked for last are right; None: that is not known yet."""

    def fetch(self, blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        """The same, waiting for it. Raises StepAbandoned or FetchFailed."""


class _Asked(NamedTuple):
    """What is under way."""

    id: str
    num_tokens: int
    blocks: list[int]  # of the stream, up to the last one that was asked for


class Precopier:
    """Copies KV ahead for one engine. `advance` is called between any two steps."""

    def __init__(self, kv: MovableKv, scheduler: Scheduler) -> None:
        self._kv = kv
        self._scheduler = scheduler
        self._target: bytes | None = None
        self._copied: dict[str, list[int]] = {}  # by stream: its first blocks, which are there
        self._asked: _Asked | None = None
        self._num_failures = 0
        self._rest = 0  # steps before the next attempt

    def forget(self) -> None:
        """Aim anew."""
        self._target, self._asked = None, None
        self._copied.clear()

    def advance(self) -> dict[str, int] | None:
        """Go on. If all is there, and only the caller has to settle: by stream, how many leading tokens are right."""
        if not self._kv.is_moving:
            self.forget()
            self._num_failures = self._rest = 0
            return None
        if self._rest:
            self._rest -= 1
            return None
        try:
            self._take_aim()
            self._prune()
            if not self._collect():
                return None
            behind = self._behind()
            if not behind:
                return self._finish()
            self._ask(behind[0])
        except (StepAbandoned, FetchFailed):
            self.forget()
            self._rest = min(1 << self._num_failures, _LONGEST_REST)
            self._num_failures += 1
        return None

    def _take_aim(self) -> None:
        target = self._kv.aim()
        if target != self._target:
            self.forget()
            self._target = target

    def _prune(self) -> None:
        """What was copied of streams that have lost it since, or have ended, does not count."""
        size, kept = self._scheduler.pool.block_size, dict[str, list[int]]()
        for stream in self._scheduler.running:
            blocks = self._copied.get(stream.id, [])[: stream.num_computed // size]
            if blocks and stream.blocks[: len(blocks)] == blocks:
                kept[stream.id] = blocks
        self._copied = kept

    def _collect(self) -> bool:
        """The answer to what was asked for; False if it has not come."""
        asked = self._asked
        if asked is None:
            return True
        num_right = self._kv.poll_fetch()
        if num_right is None:
            return False
        self._asked = None
        if num_right < asked.num_tokens:
            raise FetchFailed("KV that is in use was not found where it is")
        self._copied[asked.id] = asked.blocks
        self._prune()
        return True

    def _behind(self) -> list[Stream]:
        """Streams with more than a block that is full and not there, the furthest behind first."""
        running, size = self._scheduler.running, self._scheduler.pool.block_size
        missing = [(s.num_computed // size - len(self._copied.get(s.id, [])), s) for s in running]
        return [s for num, s in sorted(missing, key=lambda one: -one[0]) if num > 1]

    def _ask(self, stream: Stream) -> None:
        size, copied = self._scheduler.pool.block_size, len(self._copied.get(stream.id, []))
        wanted = _TO_RUN_AHEAD * max(len(self._scheduler.running) * self._scheduler.most_decoded, size)
        end = min(stream.num_computed // size, copied + self._kv.num_at_once(wanted))
        chains = stream.chains(end * size)[copied * size :]
        if self._kv.begin_fetch(stream.blocks[copied:end], chains):
            self._asked = _Asked(stream.id, len(chains), stream.blocks[:end])

    def _finish(self) -> dict[str, int]:
        """The last blocks of all streams."""
        size, num_right = self._scheduler.pool.block_size, dict[str, int]()
        for stream in self._scheduler.running:
            copied, num_tokens = len(self._copied.get(stream.id, [])), stream.num_computed
            chains = stream.chains(num_tokens)[copied * size :]
            found = self._kv.fetch(stream.blocks[copied:], len(chains), chains) if len(chains) else 0
            if found < len(chains):
                raise FetchFailed("KV that is in use was not found where it is")
            num_right[stream.id] = num_tokens
        return num_right
