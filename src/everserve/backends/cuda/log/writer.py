"""CudaLogWriter: the owner's side of a log, with its pool on a device (device_writer.py says when what is written)."""

import ctypes
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from everserve.backends.cuda.log import kernels
from everserve.backends.cuda.log.device_writer import DeviceLogWriter, Shared, num_leading
from everserve.backends.cuda.log.low_priority_stream import Side
from everserve.kvlog.chains import chains as chains_of
from everserve.kvlog.log import Log, are_blocks, checked_chains, packed_blocks
from everserve.kvlog.writer import Copy

_TOKENS_AT_ONCE = 65536  # brought from another log before we wait for them; rounded to whole blocks
_BOUNCE_BYTES = 64 << 20
_COPIERS = 4  # threads; one alone would be a good deal slower than the memory
# Kernels are short, because other workers may have to wait for them if this one dies; copies to the host are shorter.
_ROWS_AT_ONCE, _MIRRORED_AT_ONCE = 8192, 512


class Mirror(Protocol):
    """The log's blocks in host memory (registered_prefix.py)."""

    num_blocks: int  # so many of the first ones are within the device's reach. Only grows


@dataclass
class _Batch:
    """Blocks that are brought together, of one stream or several."""

    source: int  # the address of the blocks of their log
    source_blocks: Sequence[int]
    words: NDArray[np.uint64]  # of their slots, there. A valid word is never 0: a 0 means that no token was logged
    chains: NDArray[np.uint64]  # of the tokens that should be in these slots
    blocks: Sequence[int]  # of the pool
    parts: Sequence[slice] = ()  # of the slots: the tokens of each stream
    is_right: NDArray[np.bool_] | None = None  # by slot, when they have been brought


class CudaLogWriter(DeviceLogWriter):
    """`Writer` in kernels. Records are written as by any other writer.

    words_address: where the device finds the log's words, which are host memory. A step has at most `max_rows` rows.

    pool_address == log.blocks_address: the pool, on the device, is the log's blocks. Otherwise these are a mirror in
    host memory, as far as `mirror` says that the device reaches it.
    """

    def __init__(
        self, log: Log, pool_address: int, words_address: int, max_rows: int, side: Side, mirror: Mirror | None = None
    ) -> None:
        super().__init__(log, pool_address, max_rows, side)
        assert self.pool_is_in_log == (mirror is None)
        self._mirror = mirror
        self._pool = pool_address
        self._words = words_address
        self._running: _Batch | None = None  # is being brought
        shape = log.shape
        self._at_once = max(_TOKENS_AT_ONCE // shape.block_size, 1) * shape.block_size
        num_blocks = self._at_once // shape.block_size
        self._sources_B = Shared(num_blocks, torch.int32, side)
        self._blocks_B = Shared(num_blocks, torch.int32, side)
        self._wanted_T = Shared(self._at_once, torch.int64, side)
        self._words_T = Shared(self._at_once, torch.int64, side)
        self._right_T = Shared(self._at_once, torch.int32, side)
        if mirror is not None:
            self._num_bounced = min(max(_BOUNCE_BYTES // shape.block_bytes, 1), num_blocks)
            self._bounce = Shared(self._num_bounced * shape.block_bytes, torch.uint8, side)
            self._copiers = ThreadPoolExecutor(_COPIERS, thread_name_prefix="kv-copier")
        self._note_reach()
        self._log_rows = side.record(self._launch_rows)
        self._load_kernels()

    def _launch_rows(self) -> None:
        mirror, at_once = (
            (self.log.blocks_address, _MIRRORED_AT_ONCE) if self._mirror is not None else (0, _ROWS_AT_ONCE)
        )
        for first in range(0, len(self._slots_T.view), at_once):
            kernels.log_rows(
                self.log.shape, self._pool, mirror, self._words, self._count.address, self._slots_T.address,
                self._chains_T.address, first, first + at_once,
            )  # fmt: skip

    def _load_kernels(self) -> None:
        """Before a stream waits for them: one token is copied onto itself. Its word is 0, which never fits."""
        nothing, words = chains_of([0]), np.zeros(1, np.uint64)
        if self._mirror is not None:
            self._bounce_off(self.log, [0])  # the threads too
        self._bring(_Batch(self._pool, [0], words, nothing, [0]))
        self._check_some([0], words, nothing)

    def _note_reach(self) -> None:
        if self._mirror is not None:
            self.reach = self._mirror.num_blocks

    def begin(
        self,
        tokens_T: NDArray[np.int32],
        kv_slots_T: NDArray[np.int32],
        query_starts_S: NDArray[np.int32],
        chains_S: NDArray[np.uint64],
    ) -> None:
        super().begin(tokens_T, kv_slots_T, query_starts_S, chains_S)
        self._note_reach()

    def copy_in(
        self,
        source: Log,
        source_blocks: Sequence[int],
        num_tokens: int,
        chains: NDArray[np.uint64],
        blocks: Sequence[int],
    ) -> int:
        shape = self.log.shape
        assert source.shape.has_blocks_like(shape), "blocks of another kind"
        chains = checked_chains(chains, num_tokens)
        packed_blocks(source_blocks, num_tokens, source.shape)
        packed_blocks(blocks, num_tokens, shape)
        is_near = source.elsewhere is not None
        at_once = self._at_once if is_near else self._num_bounced * shape.block_size

        def bring(start: int, end: int, of_these: slice) -> int:
            sources, wanted, targets = source_blocks[of_these], chains[start:end], blocks[of_these]
            words = source.words(sources, end - start)  # before the KV: whatever is written later will not fit
            if is_near:
                return num_leading(self._bring(_Batch(source.blocks_address, sources, words, wanted, targets)))
            self._bounce_off(source, sources)
            return num_leading(self._bring(_Batch(self._bounce.address, range(len(sources)), words, wanted, targets)))

        return self._in_parts(num_tokens, at_once, bring)

    def copy_in_many(self, copies: Iterable[Copy]) -> Generator[int]:
        """Copy as many streams at once as possible: to ask takes longer than to copy. Streams begin at whole blocks.

        batch 0   prepare | copy                |
        batch 1             prepare              | copy
        caller                                     looks at batch 0
        """
        last: _Batch | None = None
        try:
            for batch in self._batches(copies):
                if len(batch) == 1:  # it may be a large one, or out of a log that the device does not reach
                    yield from self._num_right(last)
                    yield self.copy_in(*batch[0])
                    last = None
                    continue
                prepared = self._prepare(batch)
                num_right = self._num_right(last)
                self._begin_to_bring(prepared)
                last = prepared
                yield from num_right
            yield from self._num_right(last)
        finally:
            self._settle()

    def _batches(self, copies: Iterable[Copy]) -> Iterator[list[Copy]]:
        """Which of them go together: out of one log that the device reaches, as many as there is room for."""
        batch: list[Copy] = []
        room = 0
        for copy in copies:
            num_tokens = -(-copy.num_tokens // self.log.shape.block_size) * self.log.shape.block_size
            is_near = copy.source.elsewhere is not None and num_tokens <= self._at_once
            if batch and (not is_near or copy.source is not batch[0].source or num_tokens > room):
                yield batch
                batch = []
            if not batch:
                room = self._at_once if is_near else 0
            batch.append(copy)
            room -= num_tokens
        if batch:
            yield batch

    def _prepare(self, copies: list[Copy]) -> _Batch:
        shape, source = self.log.shape, copies[0].source
        assert source.shape.has_blocks_like(shape), "blocks of another kind"
        sources: list[int] = []
        targets: list[int] = []
        wanted = np.zeros(self._at_once, np.uint64)
        parts: list[slice] = []
        for copy in copies:
            num_blocks, first = -(-copy.num_tokens // shape.block_size), len(sources) * shape.block_size
            parts.append(slice(first, first + copy.num_tokens))
            wanted[parts[-1]] = checked_chains(copy.chains, copy.num_tokens)[: copy.num_tokens]
            sources += copy.source_blocks[:num_blocks]
            targets += copy.blocks[:num_blocks]
            assert len(sources) == len(targets) == first // shape.block_size + num_blocks, "too few blocks"
        assert are_blocks(targets, shape), "no blocks of this log"
        words = source.words(sources, len(sources) * shape.block_size)
        for part in parts:
            words[part.stop : -(-part.stop // shape.block_size) * shape.block_size] = 0  # of other tokens, or none
        return _Batch(source.blocks_address, sources, words, wanted[: len(words)], targets, parts)

    def _num_right(self, batch: _Batch | None) -> list[int]:
        """How many tokens of each stream are right, when all have been brought."""
        if batch is None:
            return []
        self._settle()
        assert batch.is_right is not None
        return [num_leading(batch.is_right[part]) for part in batch.parts]

    def _settle(self) -> None:
        """What is staged for the device is not needed any more."""
        self._side.wait()
        if self._running is not None:
            self._running.is_right = self._are_right(len(self._running.chains))
            self._running = None

    def count_intact(self, blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        self._settle()
        if not self.pool_is_in_log:
            return super().count_intact(blocks, num_tokens, chains)
        chains = checked_chains(chains, num_tokens)
        packed_blocks(blocks, num_tokens, self.log.shape)

        def check(start: int, end: int, of_these: slice) -> int:
            return self._check_some(blocks[of_these], self.log.words(blocks[of_these], end - start), chains[start:end])

        return self._in_parts(num_tokens, self._at_once, check)

    def _in_parts(self, num_tokens: int, at_once: int, do: Callable[[int, int, slice], int]) -> int:
        """Leading right tokens, of as many at once as there is room for."""
        num_right, size = 0, self.log.shape.block_size
        for start in range(0, num_tokens, at_once):
            end = min(start + at_once, num_tokens)
            num_right += do(start, end, slice(start // size, -(-end // size)))
            if num_right < end:
                break
        return num_right

    def _bounce_off(self, source: Log, blocks: Sequence[int]) -> None:
        """Host memory that this device does not reach (registered_prefix.py says why): through some that it does."""
        self._settle()
        num_bytes = self.log.shape.block_bytes

        def copy(first: int) -> None:
            for i in range(first, len(blocks), _COPIERS):
                at = source.blocks_address + blocks[i] * num_bytes
                ctypes.memmove(self._bounce.address + i * num_bytes, at, num_bytes)

        for _ in self._copiers.map(copy, range(_COPIERS)):
            pass

    def _bring(self, batch: _Batch) -> NDArray[np.bool_]:
        """Which of these tokens are right."""
        self._begin_to_bring(batch)
        self._settle()
        assert batch.is_right is not None
        return batch.is_right

    def _begin_to_bring(self, batch: _Batch) -> None:
        mirror = self.log.blocks_address if self._mirror is not None else 0
        self._note_reach()
        self._settle()
        self._sources_B.view[: len(batch.source_blocks)] = batch.source_blocks
        self._stage(batch.blocks, batch.words, batch.chains)
        self._side.run(
            lambda: kernels.bring(
                self.log.shape, batch.source, self._sources_B.address, self._words_T.address, self._wanted_T.address,
                len(batch.chains), self._pool, mirror, self._words, self._blocks_B.address, self.reach,
                self._right_T.address,
            )
        )  # fmt: skip
        self._running = batch

    def _check_some(self, blocks: Sequence[int], words: NDArray[np.uint64], chains: NDArray[np.uint64]) -> int:
        self._settle()
        self._stage(blocks, words, chains)
        self._side.run(
            lambda: kernels.check(
                self.log.shape, self._pool, self._blocks_B.address, self._words_T.address, self._wanted_T.address,
                len(chains), self._right_T.address,
            )
        )  # fmt: skip
        self._side.wait()
        return num_leading(self._are_right(len(chains)))

    def _stage(self, blocks: Sequence[int], words: NDArray[np.uint64], chains: NDArray[np.uint64]) -> None:
        self._blocks_B.view[: len(blocks)] = blocks
        self._words_T.view[: len(words)] = words.view(np.int64)
        self._wanted_T.view[: len(chains)] = chains.view(np.int64)

    def _are_right(self, num_tokens: int) -> NDArray[np.bool_]:
        """Which tokens of those that were staged last are right, when the device is done with them."""
        is_right: NDArray[np.bool_] = self._right_T.view[:num_tokens] != 0
        return is_right
