"""The page: what all heads of a step have in common, told to each expert worker once per step, in its lane.

    counts     how many small and large items there are
    positions  of each row
    kv_slots   of each row: where its keys and values go, in blocks of its home
    row_seqs   of each row: its line in the tables
    small, large   the items that attention is cut into (device_batch.py)
    tables     the blocks of each sequence

The home's kernels write it where a step begins (send_heads.py), before the first request; expert workers read it where
it lies, and nothing of it is believed: an index that is out of range, or a block of another home, is not used
(ops/heads.py).

An abandoned step may leave a request that is served later, with the page of the next step. That does no harm: an expert
worker serves one request of a home after the other, and such a request only writes to slots that the next step, of the
same home, writes to once more in every layer before any of its tokens counts.

This module needs neither torch nor triton.
"""

from dataclasses import dataclass
from typing import Protocol

from everserve.backends.cuda.lanes.lane import CudaLaneShape
from everserve.engine.sizing import resolve_max_model_len
from everserve.model.config import ModelConfig

SEGMENT = 512  # keys; a multiple of every block size
_UNIT = 32  # words: 128 bytes
_NUM_COUNTS = 2
_NUM_ITEM_WORDS = 4


class EngineSizes(Protocol):
    """What a page must know of an engine; `EngineConfig` is one."""

    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_model_len(self) -> int | None: ...


@dataclass(frozen=True)
class PageShape:
    """Where everything is, in words from the page's beginning."""

    max_rows: int
    max_seqs: int
    max_blocks: int  # of a sequence
    max_segments: int  # of a sequence

    @classmethod
    def of(cls, engine: EngineSizes, max_model_len: int) -> "PageShape":
        rows, size = engine.max_num_batched_tokens, engine.block_size
        max_blocks = -(-max_model_len // size)
        return cls(rows, min(rows, engine.max_num_seqs), max_blocks, -(-max_blocks * size // SEGMENT))

    @property
    def positions_at(self) -> int:
        return _up(_NUM_COUNTS)

    @property
    def kv_slots_at(self) -> int:
        return self.positions_at + _up(self.max_rows)

    @property
    def row_seqs_at(self) -> int:
        return self.kv_slots_at + _up(self.max_rows)

    @property
    def small_at(self) -> int:
        return self.row_seqs_at + _up(self.max_rows)

    @property
    def max_small(self) -> int:
        """Items: one for each segment of a row that decodes."""
        return self.max_seqs * self.max_segments

    @property
    def large_at(self) -> int:
        return self.small_at + _up(_NUM_ITEM_WORDS * self.max_small)

    @property
    def tables_at(self) -> int:
        return self.large_at + _up(_NUM_ITEM_WORDS * self.max_rows)

    @property
    def num_words(self) -> int:
        return self.tables_at + _up(self.max_seqs * self.max_blocks)


def page_shape(model: ModelConfig, engine: EngineSizes) -> PageShape:
    return PageShape.of(engine, resolve_max_model_len(engine.max_model_len, model.max_position_embeddings))


def lane_shape(model: ModelConfig, engine: EngineSizes, num_slots: int) -> CudaLaneShape:
    """The anchor that allocates a lane and both of its ends must compute the same shape."""
    top_k, page_words = model.max_shards_per_token, 0
    if model.divides_heads:
        top_k, page_words = max(top_k, model.num_kv_heads), page_shape(model, engine).num_words
    return CudaLaneShape(engine.max_num_batched_tokens, top_k, model.hidden_size, max(num_slots, 1), page_words)


def _up(size: int) -> int:
    return -(-size // _UNIT) * _UNIT
