"""An attention worker in miniature, for tests of the KV log: its KV is a function of the chains, so that everybody
knows what is right."""

import ctypes
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from everserve.kvlog.chains import START, chains, key_of
from everserve.kvlog.layout import LogShape
from everserve.kvlog.log import Log
from everserve.kvlog.writer import LogWriter
from everserve.memory.owned import create_memory
from everserve.tables.ids import WorkerId
from everserve.tables.memory import Kind, MemoryName
from everserve.worker.logs import KeptLogs

SHAPE = LogShape(num_blocks=12, block_size=4, num_layers=3, num_planes=2, piece_bytes=20, num_records=6, max_blocks=6)


def offer_log(kept: KeptLogs, id: WorkerId, fd: int, kv_fd: int | None = None) -> None:
    """The log of this worker is offered, and its blocks before it. Takes over the descriptors."""
    for kind, piece_fd in ((Kind.KV, kv_fd), (Kind.LOG, fd)):
        if piece_fd is not None:
            kept.memory.put(_piece(kind, id), piece_fd)
            kept.offer(_piece(kind, id))


def withdraw_log(kept: KeptLogs, id: WorkerId, engine) -> None:
    for kind in (Kind.LOG, Kind.KV):
        if _piece(kind, id) in kept.memory:
            kept.withdraw(_piece(kind, id), engine)
            kept.memory.drop(_piece(kind, id))


def _piece(kind: Kind, id: WorkerId) -> MemoryName:
    return MemoryName(kind=kind, owners=(id,), num_bytes=0)


def new_log(shape: LogShape = SHAPE) -> Log:
    fd = create_memory("log", shape.num_bytes)
    log = Log(fd, shape)
    os.close(fd)
    return log


def kv_of(chains_T: np.ndarray, shape: LogShape = SHAPE) -> np.ndarray:
    """The right KV of tokens with these chains: uint8 [T, layers, planes, piece_bytes]."""
    num_words = -(-shape.num_layers * shape.num_planes * shape.piece_bytes // 8)
    words = (chains_T[:, None] ^ np.arange(1, num_words + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    kv = words.view(np.uint8)[:, : shape.num_layers * shape.num_planes * shape.piece_bytes]
    return kv.reshape(len(chains_T), shape.num_layers, shape.num_planes, shape.piece_bytes)


def as_pool(memory, shape: LogShape = SHAPE) -> np.ndarray:
    """uint8 [blocks, layers, planes, block_size, piece_bytes]."""
    return np.frombuffer(memory, np.uint8).reshape(
        shape.num_blocks, shape.num_layers, shape.num_planes, shape.block_size, shape.piece_bytes
    )


def call_meanwhile(writer: LogWriter, layer: int) -> None:
    function, argument = writer.meanwhile
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(function)(argument, layer)


@dataclass
class Stream:
    index: int  # of its record
    tokens: list[int] = field(default_factory=list)  # those that are computed
    blocks: list[int] = field(default_factory=list)
    chain: int = START
    num_committed: int = 0
    num_known_blocks: int = 0


class Owner:
    """Computes streams and writes its log. `in_log`: the pool is in the log."""

    def __init__(self, log: Log, in_log: bool) -> None:
        self.log, self.shape = log, log.shape
        self.pool = self.make_pool(in_log)
        self.writer = self.make_writer()
        self.free = list(range(log.shape.num_blocks))
        self.streams: dict[str, Stream] = {}

    def make_pool(self, in_log: bool) -> np.ndarray:
        return as_pool(self.log.blocks if in_log else bytearray(len(self.log.blocks)), self.shape)

    def make_writer(self) -> LogWriter:
        return LogWriter(self.log, self.pool.ctypes.data)

    def begin(self, new_tokens: Mapping[str, list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """The rows of a step. Returns their slots and their KV."""
        slots: list[int] = []
        starts, size = [0], self.shape.block_size
        for id, tokens in new_tokens.items():
            stream = self.streams[id]
            for position in range(len(stream.tokens), len(stream.tokens) + len(tokens)):
                if position // size == len(stream.blocks):
                    stream.blocks.append(self.free.pop(0))
                slots.append(stream.blocks[position // size] * size + position % size)
            starts.append(len(slots))
        before = [self.streams[id].chain for id in new_tokens]
        chains_T = [chains(tokens, chain) for tokens, chain in zip(new_tokens.values(), before, strict=True)]
        self.writer.begin(
            np.array([token for tokens in new_tokens.values() for token in tokens], np.int32),
            np.array(slots, np.int32),
            np.array(starts, np.int32),
            np.array(before, np.uint64),
        )
        return np.array(slots, np.int32), kv_of(np.concatenate([*chains_T, np.empty(0, np.uint64)]), self.shape)

    def compute(self, layers: Iterable[int], slots_T: np.ndarray, kv_T: np.ndarray, gaps: Iterable[int] = ()) -> None:
        """The forward pass through these layers; after those in `gaps` there is time for the log."""
        blocks_T, offsets_T = np.divmod(slots_T, self.shape.block_size)
        for layer in layers:
            self.pool[blocks_T, layer, :, offsets_T] = kv_T[:, layer]
            if layer in gaps:
                call_meanwhile(self.writer, layer)

    def step(self, new_tokens: Mapping[str, list[int]], gaps: Iterable[int] = ()) -> None:
        self.compute(range(self.shape.num_layers), *self.begin(new_tokens), gaps)
        after_S = self.writer.finish()
        for (id, tokens), after in zip(new_tokens.items(), after_S, strict=True):
            stream = self.streams[id]
            stream.tokens += tokens
            stream.chain = int(after)
            assert after == chains([*stream.tokens])[-1] if stream.tokens else START

    def commit(self, id: str) -> None:
        stream = self.streams[id]
        self.writer.commit(stream.index, key_of(id), len(stream.tokens), stream.blocks, stream.num_known_blocks)
        stream.num_committed, stream.num_known_blocks = len(stream.tokens), len(stream.blocks)

    def forget(self, id: str) -> None:
        """Its blocks are used for others; its record stays as it is."""
        self.free += self.streams.pop(id).blocks

    def end(self, id: str) -> None:
        self.writer.clear(self.streams[id].index)
        self.forget(id)


class Heir(Owner):
    """Takes streams out of other logs. Dies if anything that it is told to be right is not."""

    def restore(self, source: Log, id: str, tokens: list[int]) -> int:
        """How many of these tokens can be restored."""
        record = source.find(key_of(id))
        if record is None:
            return 0
        assert record.key == key_of(id)
        num_tokens, chains_T, size = min(record.num_tokens, len(tokens)), chains(tokens), self.shape.block_size
        for i, source_block in enumerate(record.blocks):
            wanted_B = chains_T[i * size : min((i + 1) * size, num_tokens)]
            target = (source_block + 1) % self.shape.num_blocks
            num_right = self.writer.copy_in(source, [source_block], len(wanted_B), wanted_B, [target])
            right = kv_of(wanted_B[:num_right], self.shape).transpose(1, 2, 0, 3)
            assert np.array_equal(self.pool[target, :, :, :num_right], right), "restored, and wrong"
            assert np.array_equal(as_pool(self.log.blocks, self.shape)[target, :, :, :num_right], right), "or not kept"
            assert self.log.count_intact([target], len(wanted_B), wanted_B) >= num_right
            if num_right < len(wanted_B):
                return i * size + num_right
        return num_tokens
