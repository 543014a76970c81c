"""Lanes: the memory through which one attention worker and one expert worker exchange rows.

    header | page | fetch | box 0 | box 1      one lane; the anchor owns it, both workers map it

    page   positions, KV slots, block tables   of all rows of the step at hand; only where heads are asked for
    fetch  heads, blocks, chains               KV that the expert worker shall have; likewise

    box    request, call, epoch, sizes         the attention worker's line
           answer, status                      the expert worker's line
           token_R  slot_R                     for each row: which of x; which slot, and the expert expected there
           x_TD                                each token once, however many of its experts are here
           y_RD                                the answers, written by the expert worker; those of heads have another
                                               size, and lie there as densely

A request is: fill a box, store its sequence number, ring the peer's cell; an answer likewise (csrc/lanes/lane.h). There
are two boxes because an answer may be awaited in one, from a peer that was given up or not, while another request goes
out. Boxes have room for the largest step; memory is only touched, and paid for, where it is used.

x and y begin at whole numbers of rows from the beginning of the lane, and `LaneRegion` maps all lanes of a process at
whole numbers of rows from one base: so one kernel call can compute rows of many boxes where they lie.

This module needs neither torch nor numpy: the process that allocates lanes does not load them.
"""

import ctypes
import functools
import math
import mmap
import os
from dataclasses import dataclass
from typing import Any

from everserve.config.engine import EngineConfig
from everserve.engine.sizing import resolve_max_model_len
from everserve.kvlog.layout import MAX_BLOCK_SIZE
from everserve.model.config import ModelConfig
from everserve.native import BuildError, library
from everserve.native.structs import source

_c = source("lanes", "lane.h")
NUM_BOXES = _c.constants["NUM_BOXES"]
_MAGIC, _LINE = _c.constants["LANE_MAGIC"], _c.constants["CELL_LINE"]
_WORDS_BYTES, _HEADER_BYTES = _c.struct("box").size, _c.struct("lane_header").size
_PAGE_BYTES, _FETCH_BYTES = _c.struct("page").size, _c.struct("fetch").size  # before their words
_CHAIN_BYTES = 8
_FETCH_BLOCKS = 64  # memory is only touched where it is used
_FLOAT_BYTES = _INT32_BYTES = 4
_MAX_INT32 = 2**31 - 1
# A row's word in slot_R (csrc/lanes/lane.h).
_SLOT_BITS = _c.constants["SLOT_BITS"]
_IS_MOVED = 1 << 31
MAX_SLOTS, MAX_EXPERTS = 1 << _SLOT_BITS, 1 << 15


def row_word(slot: int, expert: int) -> int:
    return slot | expert << _SLOT_BITS


def moved_place(word: int) -> tuple[int, int] | None:
    """(slot, expert) of a row that was not computed because the slot holds something else; None for other rows."""
    if word >= 0:
        return None
    place = word + _IS_MOVED
    return place & (MAX_SLOTS - 1), place >> _SLOT_BITS


class LaneLayout(ctypes.Structure):
    """struct layout in csrc/lanes/lane.h."""

    _fields_ = _c.fields("layout")
    first_box: int
    box_bytes: int
    slots_at: int
    x_at: int
    y_at: int
    fetch_at: int


@dataclass(frozen=True)
class LaneShape:
    """What a lane must have room for: all tokens of a step, all of their experts and heads on one worker."""

    max_tokens: int
    top_k: int  # most experts or heads that a token goes to in one call
    hidden_size: int
    answer_size: int = 0  # most floats that come back for one token in one call; 0: `top_k` rows
    page_words: int = 0  # of the largest page; 0: no heads are asked for
    fetch_heads: int = 0  # of all layers
    fetch_blocks: int = 0  # most blocks of one fetch

    def __post_init__(self) -> None:
        assert min(self.max_tokens, self.top_k, self.hidden_size) > 0, self

    @classmethod
    def of(cls, model: ModelConfig, max_tokens: int) -> "LaneShape":
        """The anchor that allocates a lane and both of its ends compute the same shape by this."""
        return cls(max_tokens, model.max_shards_per_token, model.hidden_size)

    @classmethod
    def for_engine(cls, model: ModelConfig, engine: EngineConfig) -> "LaneShape":
        """The same for the steps of this engine, and with room for heads if they are divided."""
        max_tokens = engine.max_num_batched_tokens
        if not model.divides_heads:
            return cls.of(model, max_tokens)
        max_model_len = resolve_max_model_len(engine.max_model_len, model.max_position_embeddings)
        return cls.with_heads(
            model,
            max_tokens,
            max_num_seqs=engine.max_num_seqs,
            max_blocks=-(-max_model_len // engine.block_size),
            per_token=model.max_shards_per_token,
        )

    @classmethod
    def with_heads(
        cls, model: ModelConfig, max_tokens: int, *, max_num_seqs: int, max_blocks: int, per_token: int
    ) -> "LaneShape":
        """Where heads are asked for too. `per_token`: the most FFN rows of one token in one call; `max_blocks`: of the
        longest stream."""
        num_seqs = min(max_num_seqs, max_tokens)
        return cls(
            max_tokens,
            max(per_token, model.num_kv_heads),
            model.hidden_size,
            answer_size=max(per_token * model.hidden_size, model.num_heads * model.head_size),
            page_words=_up(4 * max_tokens + num_seqs + 2 + num_seqs * max_blocks, 2),
            fetch_heads=model.num_layers * model.num_kv_heads,
            fetch_blocks=_FETCH_BLOCKS,
        )

    @property
    def y_floats(self) -> int:
        return self.max_tokens * (self.answer_size or self.top_k * self.hidden_size)

    @property
    def max_rows(self) -> int:
        return self.max_tokens * self.top_k

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * _FLOAT_BYTES

    def layout(self) -> LaneLayout:
        unit = math.lcm(_LINE, self.row_bytes)  # rows begin where lines begin
        indices_bytes = _up(self.max_rows * _INT32_BYTES, _LINE)
        tokens_at = _WORDS_BYTES
        slots_at = tokens_at + indices_bytes
        x_at = _up(slots_at + indices_bytes, unit)
        y_at = _up(x_at + self.max_tokens * self.row_bytes, unit)
        box_bytes = _up(y_at + self.y_floats * _FLOAT_BYTES, unit)
        fetch_at = _up(_HEADER_BYTES + _PAGE_BYTES + self.page_words * _INT32_BYTES, _LINE)
        first_box = _up(fetch_at + self._fetch_bytes, unit)
        return LaneLayout(
            *(self.max_tokens, self.top_k, self.hidden_size),
            *(first_box, box_bytes),
            *(tokens_at, slots_at, x_at, y_at),
            *(self.y_floats, _HEADER_BYTES, self.page_words),
            *(fetch_at, self.fetch_heads, self.fetch_blocks, self.fetch_tokens),
        )

    @property
    def fetch_tokens(self) -> int:
        """Most tokens of one fetch."""
        return self.fetch_blocks * MAX_BLOCK_SIZE if self.fetch_blocks else 0

    @property
    def _fetch_bytes(self) -> int:
        if not self.fetch_heads:
            return 0
        num_words = 2 * self.fetch_heads + 2 * self.fetch_blocks
        return _FETCH_BYTES + _CHAIN_BYTES * self.fetch_tokens + _INT32_BYTES * num_words

    def lane_bytes(self) -> int:
        """How much memory a lane needs: a whole number of pages and of rows."""
        layout = self.layout()
        return _up(layout.first_box + NUM_BOXES * layout.box_bytes, math.lcm(mmap.PAGESIZE, self.row_bytes))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class LaneRegion:
    """Addresses for the lanes of one process, and what is mapped there."""

    def __init__(self, shape: LaneShape, max_lanes: int) -> None:
        self.lane_bytes = shape.lane_bytes()
        self.num_bytes = max_lanes * self.lane_bytes
        self.num_rows = self.num_bytes // shape.row_bytes
        if self.num_rows > _MAX_INT32:
            raise ValueError(f"{max_lanes} lanes of {shape} have more rows than an index can count")
        self.base: int = _checked(load().brief.es_region_reserve(self.num_bytes))
        self._free = [self.base + i * self.lane_bytes for i in reversed(range(max_lanes))]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def map(self, fd: int) -> int:
        """Map a lane; returns its address. The descriptor stays the caller's, and may be closed."""
        size = os.fstat(fd).st_size
        if size < self.lane_bytes:  # reading beyond the end would be SIGBUS
            raise ValueError(f"a lane has {self.lane_bytes} bytes, this memory has {size}")
        address = self._free.pop()
        _checked(load().brief.es_region_map(address, self.lane_bytes, fd))
        return address

    def unmap(self, address: int) -> None:
        assert address not in self._free, "unmapped twice"
        _checked(load().brief.es_region_unmap(address, self.lane_bytes))
        self._free.append(address)

    def close(self) -> None:
        """Let go of everything; no address is valid afterwards."""
        if self.num_bytes:
            _checked(load().brief.es_region_release(self.base, self.num_bytes))
        self.num_bytes = 0
        self._free.clear()


def write_header(address: int, shape: LaneShape, attention: tuple[int, int], expert: tuple[int, int]) -> None:
    """Sign a lane with its shape and with the rank and incarnation of both ends."""
    header = (ctypes.c_int64 * 10).from_address(address)
    sizes = [shape.max_tokens, shape.top_k, shape.hidden_size]
    header[:] = [_MAGIC, *sizes, *attention, *expert, shape.y_floats, shape.page_words]


class Library:
    """The functions of csrc/*.c."""

    def __init__(self) -> None:
        path = str(library("lanes"))
        try:
            self.blocking = ctypes.CDLL(path)  # gives up the interpreter's lock around a call
            self.brief = ctypes.PyDLL(path)
        except OSError as e:
            raise BuildError(f"cannot load the lanes library: {e}") from e
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        signatures: list[tuple[Any, list[Any], Any]] = [
            (self.brief.es_region_reserve, [int64], int64),
            (self.brief.es_region_map, [int64, int64, int64], int64),
            (self.brief.es_region_unmap, [int64, int64], int64),
            (self.brief.es_region_release, [int64, int64], int64),
            (self.blocking.es_lane_exchange, [pointer], int64),
            (self.blocking.es_lane_cross, [pointer, int64, int64, int64, pointer, pointer], int64),
            (self.blocking.es_lane_wait, [pointer], int64),
            (self.brief.es_lane_send, [pointer], int64),
            (self.brief.es_lane_settle, [pointer], None),
            (self.brief.es_lane_collect, [pointer, pointer], None),
            (self.brief.es_lane_retire, [pointer, pointer], None),
            (self.brief.es_lane_count_stale, [pointer, pointer], None),
            (self.blocking.es_lane_poll, [pointer], int64),
            (self.blocking.es_lane_serve, [pointer, pointer], int64),
            (self.brief.es_lane_gather, [pointer, int64, int64], int64),
            (self.brief.es_lane_gather_heads, [pointer, int64, int64], int64),
            (self.brief.es_lane_answer, [pointer, int64], None),
            (self.brief.es_lane_send_fetch, [pointer, int64, pointer], int64),
            (self.blocking.es_lane_wait_fetches, [pointer], int64),
            (self.brief.es_lane_num_fetching, [pointer], int64),
            (self.brief.es_lane_take_fetch, [pointer, int64, pointer], int64),
            (self.brief.es_lane_answer_fetch, [pointer, int64, int64, int64, int64], None),
        ]
        for function, arguments, result in signatures:
            function.argtypes, function.restype = arguments, result


@functools.cache
def load() -> Library:
    """Compiled on first use."""
    return Library()


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result
