"""Steps that are launched before the step in front of them has ended.

Which streams decode in the next step, and where their KV goes, does not depend on the tokens that the current step
chooses. Only the rows' tokens do, and on a device these are there already. So a device need not wait for the host:

    device   |------ N ------|---- N + 1 ----|---- N + 2 ----|
    host     launch N + 1      read N: tokens and ends; receive
             tell of N - 1     launch N + 2; tell of N ...

    launched ahead if   all streams of step N have a token at its end, which the device chooses; no other stream may
                        begin; there are blocks; routes and mask stay as they are (Forward.may_go_ahead, and the caller)
    otherwise           N + 1 is scheduled when N has ended

What the host decides after that takes effect one step later, and changes no stream: one that ended in N, or was
cancelled, has a row in N + 1. Its token is dropped, and its KV, which lies in a slot behind what counts as computed, is
not logged. Only steps that are launched later write to the blocks that it had: anything else that takes blocks waits
until no step is on its way.

If N is abandoned, so is N + 1, and everything that was scheduled for either is rolled back. If N has ended and N + 1
is abandoned, streams keep a block that they may have got for it ahead of time: the repeated step needs it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everserve.engine.batching import Rows
from everserve.engine.forward import Pending
from everserve.engine.sequence import Chunk, Status


class Launched(NamedTuple):
    """A step on its way. `kept`: which of the chunks that were launched these are; None: all."""

    chunks: list[Chunk]
    rows: Rows
    pending: Pending
    kept: list[int] | None = None

    def of_running(self) -> "Launched":
        """Of a step that was launched ahead, when the step before it has ended: what still counts, with the tokens that
        are known now. Every chunk is one token."""
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
        return Launched(chunks, rows._replace(tokens_T=tokens_T), self.pending, kept)

    def chosen(self, tokens: list[int]) -> list[int]:
        """Of the tokens that the device has chosen: those of these chunks."""
        return tokens if self.kept is None else [tokens[i] for i in self.kept]

    def sources(self, chunks: list[Chunk]) -> NDArray[np.int32]:
        """For the next step: where the device has the token of each of its chunks."""
        kept = self.kept if self.kept is not None else range(len(self.chunks))
        if chunks is self.chunks:
            return np.fromiter(kept, np.int32, len(chunks))
        source_of = {chunk[0].id: source for chunk, source in zip(self.chunks, kept, strict=True)}
        return np.array([source_of[chunk[0].id] for chunk in chunks], np.int32)

    def num_ahead(self, chunks: list[Chunk]) -> list[int]:
        """For the next step: how many tokens of each of its streams are in this one."""
        if chunks is self.chunks:
            return [1] * len(chunks)
        num_of = {chunk[0].id: chunk[1] for chunk in self.chunks}
        return [num_of[chunk[0].id] for chunk in chunks]
