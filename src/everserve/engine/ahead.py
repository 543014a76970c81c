"""Steps that are launched before the step in front of them has ended.

Which streams decode in the next step, and where their KV goes, does not depend on the tokens that the current step
chooses. Only the rows' tokens do, and on a device these are there already. So a device need not wait for the host:

    device   |---------- N ----------|-------- N + 1 --------|---- N + 2
    host     tell of N - 1   launch   read N: tokens and ends;
                              N + 1   receive; tell of N ...

    launched ahead if   all streams of step N have a token at its end, which the device chooses; no other stream may
                        begin; there are blocks; routes and mask stay as they are (Forward.may_go_ahead, and the caller)
    otherwise           N + 1 is scheduled when N has ended

It is launched as late as the device allows (`Lead`): a stream that arrives until then, or routes that change, wait for
the end of N, and not for that of N + 1 too. A stream that comes from a dead worker has no time to lose.

What the host decides after that takes effect one step later, and changes no stream: one that ended in N, or was
cancelled, has a row in N + 1. Its token is dropped, and its KV, which lies in a slot behind what counts as computed, is
not logged. Only steps that are launched later write to the blocks that it had: anything else that takes blocks waits
until no step is on its way.

If N is abandoned, so is N + 1, and everything that was scheduled for either is rolled back. If N has ended and N + 1
is abandoned, streams keep a block that they may have got for it ahead of time: the repeated step needs it.
"""

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from everserve.engine.batching import Rows
from everserve.engine.forward import Pending
from everserve.engine.sequence import Chunk, Status

_JITTER_S = 0.001  # steps of the same size differ by less, where nothing happens
_FORGET = 0.9  # of the longest launch, with each one
Step = TypeVar("Step")
Result = TypeVar("Result")


class Lead:
    """How long before the end of a step the next one is launched: a little longer than that takes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._launch_s = 0.0  # the longest lately

    @property
    def seconds(self) -> float:
        return _JITTER_S + 2 * self._launch_s

    def is_worth_waiting_for(self, due_s: float) -> bool:
        """A step that ends soon leaves no time to do anything else first."""
        return due_s - self._clock() > 3 * self.seconds

    def launch_at(self, due_s: float) -> float:
        return due_s - self.seconds

    def timed(self, launch: Callable[[Step], Result], step: Step) -> Result:
        began_s = self._clock()
        result = launch(step)
        if result is not None:
            self._launch_s = max(self._clock() - began_s, _FORGET * self._launch_s)
        return result


class Launched(NamedTuple):
    """A step on its way. `kept`: which of the chunks that were launched these are; None: all. `is_decoding`: they are
    one more token, and perhaps drafts, of every running stream."""

    chunks: list[Chunk]
    rows: Rows
    pending: Pending
    kept: list[int] | None = None
    is_decoding: bool = False

    def of_running(self) -> "Launched":
        """What a step that was launched ahead becomes when the step before it has ended: what still counts, with the
        tokens that are known now. Every chunk is one token.
        """
        chunks, rows, kept = self.chunks, self.rows, None
        if not all([chunk[0].status is Status.RUNNING for chunk in chunks]):  # noqa: C419 (a list is quicker)
            kept = [i for i, chunk in enumerate(chunks) if chunk[0].status is Status.RUNNING]
            chunks = [chunks[i] for i in kept]
            rows = rows._replace(
                positions_T=rows.positions_T[kept],
                kv_slots_T=rows.kv_slots_T[kept],
                query_starts_S=rows.query_starts_S[: len(kept) + 1],
                block_tables_SB=rows.block_tables_SB[kept],
                logits_rows_L=rows.logits_rows_L[: len(kept)],
            )
        tokens_T = np.array([chunk[0].tokens[-1] for chunk in chunks], np.int32)
        return Launched(chunks, rows._replace(tokens_T=tokens_T), self.pending, kept, self.is_decoding)

    def chosen(self, tokens: list[int]) -> list[int]:
        """The tokens that the device has chosen: those of these chunks."""
        return tokens if self.kept is None else [tokens[i] for i in self.kept]

    def sources(self, chunks: list[Chunk]) -> NDArray[np.int32]:
        """Sources for the next step: where the device has the token of each of its chunks."""
        kept = self.kept if self.kept is not None else range(len(self.chunks))
        if chunks is self.chunks:
            return np.fromiter(kept, np.int32, len(chunks))
        source_of = {chunk[0].id: source for chunk, source in zip(self.chunks, kept, strict=True)}
        return np.array([source_of[chunk[0].id] for chunk in chunks], np.int32)

    def num_ahead(self, chunks: list[Chunk]) -> list[int]:
        """Counts for the next step: how many tokens of each of its streams are in this one."""
        if chunks is self.chunks:
            return [1] * len(chunks)
        num_of = {chunk[0].id: chunk[1] for chunk in self.chunks}
        return [num_of[chunk[0].id] for chunk in chunks]
