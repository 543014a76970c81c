"""HeadLogWriter: the log of a home whose streams' KV is with divided heads, in the memory of expert seats.

The home has the records, in memory that outlives it. Beside the KV of each token, in each head's piece, stands a word
that the home writes on the side, when the step that has computed it is over; with `--kv-log mirror` it copies both into
host memory in the same pass (head_mirror.py). So a stream's next home takes blocks of its own range and copies the
tokens there, in all pools, each verified on arrival (head_fetcher.py).
"""

from collections.abc import Generator, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from everserve.backends.cuda.lanes.head_kv import CudaHeadKv
from everserve.backends.cuda.log import head_kernels
from everserve.backends.cuda.log.device_writer import DeviceLogWriter, Shared
from everserve.backends.cuda.log.head_fetcher import HeadFetcher, PlacesOfHeads
from everserve.backends.cuda.log.head_mirror import NO_BLOCK
from everserve.errors import FetchFailed
from everserve.kvlog.log import Log
from everserve.kvlog.writer import Copy

# Short kernels: other workers may have to wait for them if this one dies; copies to the host are shorter.
_ROWS_AT_ONCE, _MIRRORED_AT_ONCE = 1024, 256


class HeadLogWriter(DeviceLogWriter):
    """`Writer` for the engine whose heads are where `kv` says. `log` has records only."""

    is_elsewhere = True

    def __init__(self, log: Log, kv: CudaHeadKv, fetcher: HeadFetcher, max_rows: int) -> None:
        side = fetcher.side
        super().__init__(log, log.blocks_address, max_rows, side)
        assert self.pool_is_in_log
        self._kv = kv
        self._fetcher = fetcher
        self._places = PlacesOfHeads(len(fetcher.heads), 1, side)
        self._owners = Shared(len(fetcher.heads), torch.int64, side)
        self._owners.view[:] = fetcher.owners_H
        self._mirror = PlacesOfHeads(len(fetcher.heads), 1, side)
        self._mirror_slots_T = Shared(max_rows, torch.int32, side)
        fetcher.mirror_of(self._mirror, range(len(fetcher.heads)))
        self._placed_at: tuple[int, int] | None = None
        self._log_rows = side.record(self._launch_rows)

    def _launch_rows(self) -> None:
        mirror = self._mirror.arguments if self._fetcher.mirrors is not None else None
        at_once = _MIRRORED_AT_ONCE if mirror is not None else _ROWS_AT_ONCE
        for first in range(0, len(self._slots_T.view), at_once):
            head_kernels.sign(
                self._fetcher.rows, self._places.arguments, mirror, self._owners.address, len(self._fetcher.heads),
                self._count.address, self._slots_T.address, self._mirror_slots_T.address, self._chains_T.address,
                first, first + at_once,
            )  # fmt: skip

    def finish(self) -> NDArray[np.uint64]:
        """Heads that are out of reach get no words: their KV is computed again if it is needed elsewhere."""
        now = self._kv.at.num_changes, self._fetcher.pools.num_changes
        if now != self._placed_at:
            self._side.wait()
            self._fetcher.places_of(self._reached_ranks(), self._places, range(len(self._fetcher.heads)))
            self._placed_at = now
        return super().finish()

    def _reached_ranks(self) -> NDArray[np.int32]:
        """Where the step has stored KV; -1 where that is out of reach. Memory of the same seat that is another one by
        now is none of it: its device was lost since, and a word would certify whatever is there, in the mirror too."""
        pools, ranks_H = self._fetcher.pools, self._kv.at.rank_LG.reshape(-1)
        reached = [rank for rank in pools.ranks if self._kv.is_in(rank, pools.pool_of(rank))]
        return np.where(np.isin(ranks_H, reached), ranks_H, -1).astype(np.int32)

    def _stage_rows(self, slots_T: NDArray[np.int32]) -> None:
        super()._stage_rows(slots_T)
        if self._fetcher.mirrors is not None:
            blocks_T, within_T = np.divmod(slots_T, self.log.shape.block_size)
            numbers_T = np.array(self._fetcher.mirrors.own.numbers_of(blocks_T.tolist()), np.int32)
            mirrored_T = numbers_T * self.log.shape.block_size + within_T
            self._mirror_slots_T.view[: len(slots_T)] = np.where(numbers_T == NO_BLOCK, -1, mirrored_T)

    def copy_in(
        self,
        source: Log,
        source_blocks: Sequence[int],
        num_tokens: int,
        chains: NDArray[np.uint64],
        blocks: Sequence[int],
    ) -> int:
        (num_right,) = self.copy_in_many([Copy(source, source_blocks, num_tokens, chains, blocks)])
        return num_right

    def copy_in_many(self, copies: Iterable[Copy]) -> Generator[int]:
        """Raises StepAbandoned if a worker is not there whose heads every step needs."""
        copies = list(copies)
        try:
            yield from self._kv.fetch_all(copies) if copies else []
        except FetchFailed:
            yield from [0] * len(copies)

    def count_intact(self, blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        """Counts what is right: also what is not right where it is, but elsewhere, is right then."""
        return self.copy_in(self.log, blocks, num_tokens, chains, blocks)
