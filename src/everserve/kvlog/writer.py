"""The owner's side of a log: what every writer does (Writer), and the one whose pool is in host memory (LogWriter).

A step's KV goes into the log as it is computed, and streams are committed after it:

    writer.begin(rows of the step)          then the forward pass; `meanwhile` is called in it wherever there is time
    chains_S = writer.finish()              or abandon(), if the pass was abandoned
    writer.commit_many(...)                 whenever the outputs are on their way

Until its words are written a token is not in the log; until it is committed no reader looks for it.

Streams that decode do the same in every step: one more token each. A writer can *follow* them, which takes a third of
the time; nothing is done in Python for each stream then:

    writer.begin(...); writer.follow(what their records say)
    writer.finish_next()                    commits them too
    writer.begin_next(...)                  the next step, with one row for each of them
    ...
    writer.let_go()                         what their records say now. Also in the middle of a step
"""

import ctypes
import functools
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from struct import Struct
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from everserve.kvlog.chains import KEY_BYTES
from everserve.kvlog.library import load
from everserve.kvlog.log import Log, checked_chains, packed_blocks
from everserve.native.structs import source

_FIRST_CAPACITY = 64  # rows, and sequences
_c = source("kvlog", "writer.c")
_commit = _c.packer("commit", as_bytes="key")


@functools.lru_cache(64)
def _commits(num: int) -> Callable[..., bytes]:
    return Struct(num * _commit.format).pack


class Commit(NamedTuple):
    """See `LogWriter.commit`."""

    index: int  # type: ignore[assignment]  # a tuple has a method of that name
    key: bytes
    num_tokens: int
    blocks: Sequence[int]
    num_known_blocks: int


class Followed(NamedTuple):
    """A stream that was followed."""

    num_tokens: int  # what its record says
    num_blocks: int
    chain: int  # after that many tokens


class Copy(NamedTuple):
    """See `Writer.copy_in`."""

    source: Log
    source_blocks: Sequence[int]
    num_tokens: int
    chains: NDArray[np.uint64]
    blocks: Sequence[int]


class Writer(Protocol):
    """Writes one log. There is one writer at a time: the process that owns the pool."""

    log: Log
    pool_is_in_log: bool  # then nothing is copied, only words are written
    is_elsewhere: bool  # KV is kept, and certified, by other workers: to look at it is to ask them
    is_on_device: bool  # a step may be begun, and finished, when the next one computes; copies cost less together
    follows: bool  # it has `follow`, and the three that come with it
    reach: int  # blocks with a lower number go into the log, others do not yet; it may grow with `begin` and `copy_in`

    def begin(
        self,
        tokens_T: NDArray[np.int32],
        kv_slots_T: NDArray[np.int32],
        query_starts_S: NDArray[np.int32],
        chains_S: NDArray[np.uint64],
    ) -> None:
        """The rows of a step, as in `StepBatch`. chains_S: the chain before each sequence's first row.

        A step that was begun before and not finished is forgotten.
        """

    def finish(self) -> NDArray[np.uint64]:
        """The step has been computed: take what is left and write the words (they are there at the latest when streams
        are committed). Returns the chain after each sequence's last row."""

    def abandon(self) -> None:
        """The step never happened. Its slots may hold rubbish; words that stand beside it do not fit it."""

    def follow(self, commits: Sequence[Commit]) -> None:
        """Follows streams in a step that has just begun, with one row for each sequence: these are their records."""

    def begin_next(self, tokens_T: NDArray[np.int32], kv_slots_T: NDArray[np.int32]) -> None:
        """The next token of each."""

    def finish_next(self) -> None:
        """It has been computed."""

    def let_go(self) -> tuple[list[Followed], list[int]]:
        """What they have come to; and the slots of a step that was begun and not finished."""

    def commit_many(self, commits: Iterable[Commit]) -> None:
        """Several streams, in one call."""

    def clear(self, index: int) -> None:
        """The stream has ended: its record does not count any more."""

    def copy_in(
        self,
        source: Log,
        source_blocks: Sequence[int],
        num_tokens: int,
        chains: NDArray[np.uint64],
        blocks: Sequence[int],
    ) -> int:
        """Bring the first tokens of a stream out of blocks of another log into blocks of the pool and of our log.

        Verified on arrival; returns how many leading tokens are right, and in our log with their words. What lies
        behind these in the pool's blocks is rubbish.
        """

    def copy_in_many(self, copies: Iterable[Copy]) -> Generator[int]:
        """Several streams: how many leading tokens of each are right, in this order. Some may be copied while the
        caller looks at those before them. When it is closed, nothing is copied any more."""

    def count_intact(self, blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        """`Log.count_intact` of our own log."""


class _Writer(ctypes.Structure):
    """struct writer in csrc/writer.c."""

    _fields_ = _c.fields("writer")


def _pack(commits: Sequence[Commit]) -> bytes:
    """An array of struct commit."""
    fields: list[int | bytes] = []
    for index, key, num_tokens, blocks, num_known_blocks in commits:
        assert len(key) == KEY_BYTES
        fields += (index, key, num_tokens, len(blocks), num_known_blocks)
    return _commits(len(commits))(*fields)


class LogWriter:
    """`Writer` in C. pool_address == log.blocks_address: the pool is in the log."""

    is_on_device = False
    is_elsewhere = False
    follows = True

    def __init__(self, log: Log, pool_address: int) -> None:
        assert not log.closed
        self.log = log
        self.pool_is_in_log = pool_address == log.blocks_address
        self.reach = log.shape.num_blocks
        self._library = load()
        self._finish = self._library.blocking.es_log_finish
        self._begin_next = self._library.brief.es_log_begin_next
        self._writer = _Writer(
            log=log.address, pool=pool_address, last_seq=self._library.brief.es_log_last_seq(log.address)
        )
        self._address = ctypes.addressof(self._writer)
        self._num_seqs = 0
        self._followed = ctypes.create_string_buffer(0)  # struct commit, for each sequence
        self._make_room(_FIRST_CAPACITY, _FIRST_CAPACITY)
        function = ctypes.cast(self._library.blocking.es_log_meanwhile, ctypes.c_void_p).value
        assert function is not None
        # void f(void *argument, int64_t layer) and its argument, for the gap in which the worker waits for experts:
        # takes all layers of this step's rows up to and including `layer` that are not taken yet.
        self.meanwhile: tuple[int, int] = (function, self._address)

    def _make_room(self, num_rows: int, num_seqs: int) -> None:
        """For larger steps than any before. The arrays are ours, so that their addresses stay what C was told."""
        self._tokens, self._slots = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        self._query_starts, self._chains = np.zeros(num_seqs + 1, np.int32), np.zeros(num_seqs, np.uint64)
        self._checksums = np.zeros(num_rows, np.uint64)
        self._writer.tokens, self._writer.slots = self._tokens.ctypes.data, self._slots.ctypes.data
        self._writer.query_starts, self._writer.chains = self._query_starts.ctypes.data, self._chains.ctypes.data
        self._writer.checksums = self._checksums.ctypes.data

    def begin(
        self,
        tokens_T: NDArray[np.int32],
        kv_slots_T: NDArray[np.int32],
        query_starts_S: NDArray[np.int32],
        chains_S: NDArray[np.uint64],
    ) -> None:
        assert not self._writer.followed
        num_rows, num_seqs = len(tokens_T), len(chains_S)
        assert len(kv_slots_T) == num_rows and len(query_starts_S) == num_seqs + 1
        if num_rows > len(self._tokens) or num_seqs > len(self._chains):
            self._make_room(max(num_rows, 2 * len(self._tokens)), max(num_seqs, 2 * len(self._chains)))
        self._tokens[:num_rows] = tokens_T
        self._slots[:num_rows] = kv_slots_T
        self._query_starts[: num_seqs + 1] = query_starts_S
        self._chains[:num_seqs] = chains_S
        self._num_seqs = num_seqs
        error = self._library.brief.es_log_begin(self._address, num_rows, num_seqs)
        assert not error, "the log is closed, or these are no rows of its pool"

    def finish(self) -> NDArray[np.uint64]:
        error = self._finish(self._address)
        assert not error, "the log is closed"
        return self._chains[: self._num_seqs].copy()

    def abandon(self) -> None:
        assert not self._writer.followed
        self._writer.num_rows = self._num_seqs = 0

    def follow(self, commits: Sequence[Commit]) -> None:
        assert len(commits) == self._num_seqs == self._writer.num_rows
        packed = _pack(commits)
        self._followed = ctypes.create_string_buffer(packed, len(packed))
        self._writer.followed = ctypes.addressof(self._followed)

    def begin_next(self, tokens_T: NDArray[np.int32], kv_slots_T: NDArray[np.int32]) -> None:
        assert len(tokens_T) == len(kv_slots_T) == self._num_seqs
        error = self._begin_next(self._address, tokens_T.tobytes(), kv_slots_T.tobytes())
        assert not error, "the log is closed, or these are no rows of its pool"

    def finish_next(self) -> None:
        error = self._finish(self._address)
        assert not error, "the log is closed, or a stream is longer than its record"

    def let_go(self) -> tuple[list[Followed], list[int]]:
        self._writer.followed = 0
        records, chains = _commit.iter_unpack(self._followed), self._chains[: self._num_seqs].tolist()
        followed = [
            Followed(num_tokens, num_blocks, chain)
            for (_, _, num_tokens, num_blocks, _), chain in zip(records, chains, strict=True)
        ]
        return followed, self._slots[: self._writer.num_rows].tolist()

    def commit(self, index: int, key: bytes, num_tokens: int, blocks: Sequence[int], num_known_blocks: int) -> None:
        """Record, in this place, that the first `num_tokens` tokens of a stream are in these blocks of the log.

        The first `num_known_blocks` of them are what the last commit in this place has said.
        """
        self.commit_many([Commit(index, key, num_tokens, blocks, num_known_blocks)])

    def commit_many(self, commits: Iterable[Commit]) -> None:
        """In one piece: it is done after every step, for hundreds of streams. What numbers mean is checked in C."""
        commits = list(commits)
        new_blocks = array("i")
        for _, _, _, blocks, num_known_blocks in commits:
            if num_known_blocks < len(blocks):  # few of them
                new_blocks.extend(blocks[num_known_blocks:])
        error = self._library.brief.es_log_commit(self._address, _pack(commits), len(commits), new_blocks.tobytes())
        assert not error, "the log is closed, or these are no records and blocks of it"

    def clear(self, index: int) -> None:
        assert 0 <= index < self.log.shape.num_records
        error = self._library.brief.es_log_clear(self._address, index)
        assert not error, "the log is closed"

    def copy_in(
        self,
        source: Log,
        source_blocks: Sequence[int],
        num_tokens: int,
        chains: NDArray[np.uint64],
        blocks: Sequence[int],
    ) -> int:
        assert source.shape.has_blocks_like(self.log.shape), "blocks of another kind"
        chains = checked_chains(chains, num_tokens)
        num_right: int = self._library.blocking.es_log_copy_in(
            self._address,
            source.address,
            packed_blocks(source_blocks, num_tokens, source.shape),
            num_tokens,
            chains.ctypes.data,
            packed_blocks(blocks, num_tokens, self.log.shape),
        )
        assert num_right >= 0, "a log is closed"
        return num_right

    def copy_in_many(self, copies: Iterable[Copy]) -> Generator[int]:
        yield from (self.copy_in(*copy) for copy in copies)

    def count_intact(self, blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        return self.log.count_intact(blocks, num_tokens, chains)
