"""KeptKv: the log of a home whose streams' KV is kept by other workers.

The home has the records, in memory that outlives it: which streams there are, how far they have come, in which blocks.
Their KV is in the pools of the workers that have heads, with a word for each token in each piece. So the log has no
blocks and no words of its own: a stream's next home takes blocks of its own range, and all workers bring the tokens
over, each for its heads (HeadKv.fetch_all).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from everserve.backends.cpu.remote_heads import RemoteHeads
from everserve.errors import FetchFailed
from everserve.kvlog.library import load
from everserve.kvlog.log import Log
from everserve.kvlog.writer import LogWriter


class KeptKv(LogWriter):
    """`Writer` for the engine that reaches its heads through these. `log` has records only."""

    is_elsewhere = True
    follows = False

    def __init__(self, log: Log, heads: RemoteHeads) -> None:
        super().__init__(log, log.blocks_address)
        assert self.pool_is_in_log
        self._heads = heads
        self._chains_S = np.zeros(0, np.uint64)

    def begin(
        self,
        tokens_T: NDArray[np.int32],
        kv_slots_T: NDArray[np.int32],
        query_starts_S: NDArray[np.int32],
        chains_S: NDArray[np.uint64],
    ) -> None:
        """The rows' chains travel with the step; workers write the words."""
        tokens_T, starts_S = np.ascontiguousarray(tokens_T, np.int32), np.ascontiguousarray(query_starts_S, np.int32)
        self._chains_S = np.array(chains_S, np.uint64)
        assert len(tokens_T) <= len(self._heads.chains_T)
        load().brief.es_log_chains_of_rows(
            tokens_T.ctypes.data, starts_S.ctypes.data, len(self._chains_S),
            self._chains_S.ctypes.data, self._heads.chains_T.ctypes.data,
        )  # fmt: skip

    def finish(self) -> NDArray[np.uint64]:
        return self._chains_S

    def abandon(self) -> None: ...

    def copy_in(
        self,
        source: Log,
        source_blocks: Sequence[int],
        num_tokens: int,
        chains: NDArray[np.uint64],
        blocks: Sequence[int],
    ) -> int:
        """Raises StepAbandoned if a worker is not there that has to bring its part."""
        try:
            return self._heads.kv.fetch_all(source_blocks, blocks, num_tokens, chains)
        except FetchFailed:
            return 0

    def count_intact(self, blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        """Counts what is right: also what is not right where it is, but elsewhere, is right then."""
        return self.copy_in(self.log, blocks, num_tokens, chains, blocks)
