"""DeviceBatch: a step's rows in device memory, at addresses that never change.

Captured graphs read them there: a step is a copy of new contents, then a replay. A batch has room for a fixed number of
rows (its *bucket*); the unused rows are padding: they have position -1, store nothing, attend to nothing
and are routed nowhere.

Attention is cut into work *items* on the host, because only the host knows lengths before a step:

    (first_row, num_rows, first_segment, num_segments)

Keys are counted in segments of SEGMENT. A row of a decoding sequence becomes one item per segment, so that a single
long sequence keeps the whole device busy; rows of a prompt become items of several rows over all their segments. Either
way a row's segments are computed alike and merged in the same order: the same bits.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from everserve.backends.cuda.lanes import page
from everserve.model.batch import StepBatch

SEGMENT = page.SEGMENT  # keys
SMALL, LARGE = 16, 64  # query rows (rows times heads per KV head) of an item, at most
NUM_COUNTS = 8  # words in front of everything else


@dataclass(frozen=True, kw_only=True)
class Items:
    """Work of one size, and how much of it there is."""

    items_W4: Tensor  # int32
    num_items: Tensor  # int32, one element


@dataclass(frozen=True, kw_only=True)
class DeviceBatch(StepBatch):
    """A StepBatch with padding. `query_starts_S` is empty: `row_seqs_T` says the same row by row.

    `large` is None in batches that only ever hold decoding sequences.
    """

    row_seqs_T: Tensor  # int32: a row's line in block_tables_SB
    small: Items
    large: Items | None


def cut(
    positions_T: NDArray[np.int32], query_starts_S: NDArray[np.int32], group: int, max_split: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Small and large items of these rows. `group`: query heads per KV head.

    Only the first `max_split` rows have room for partial results. (Decoding sequences come first; further back there
    may be a prompt's very last row.)
    """
    if len(positions_T) == len(query_starts_S) - 1 <= max_split:  # nearly always: all sequences decode
        return _one_per_segment(query_starts_S[:-1], positions_T // SEGMENT + 1), np.empty((0, 4), np.int32)
    starts, lengths = query_starts_S[:-1], np.diff(query_starts_S)
    single = starts[lengths == 1]
    num_segments = positions_T[single] // SEGMENT + 1
    may_split = single < max_split
    small = np.concatenate(
        [
            _one_per_segment(single[may_split], num_segments[may_split]),
            _whole(single[~may_split], num_segments[~may_split]),
        ]
    )
    is_prompt = lengths > 1
    return small, _several_rows(starts[is_prompt], lengths[is_prompt], positions_T, max(LARGE // group, 1))


def _several_rows(
    start_P: NDArray[np.int32], length_P: NDArray[np.int32], positions_T: NDArray[np.int32], num_rows: int
) -> NDArray[np.int32]:
    """Prompts in items of so many rows, over all segments of their last row. (Thousands in a large step: in numpy.)"""
    num_items_P = -(-length_P // num_rows)
    items = np.zeros((int(num_items_P.sum()), 4), np.int32)
    index = np.arange(len(items)) - np.repeat(np.cumsum(num_items_P) - num_items_P, num_items_P)  # in its prompt
    items[:, 0] = np.repeat(start_P, num_items_P) + index * num_rows
    items[:, 1] = np.minimum(np.repeat(length_P, num_items_P) - index * num_rows, num_rows)
    items[:, 3] = positions_T[items[:, 0] + items[:, 1] - 1] // SEGMENT + 1
    return items


def _one_per_segment(row_R: NDArray[np.int32], num_segments_R: NDArray[np.int32]) -> NDArray[np.int32]:
    items = np.empty((int(num_segments_R.sum()), 4), np.int32)
    items[:, 0] = np.repeat(row_R, num_segments_R)
    items[:, 1] = items[:, 3] = 1
    items[:, 2] = np.arange(len(items)) - np.repeat(np.cumsum(num_segments_R) - num_segments_R, num_segments_R)
    return items


def _whole(row_R: NDArray[np.int32], num_segments_R: NDArray[np.int32]) -> NDArray[np.int32]:
    items = np.zeros((len(row_R), 4), np.int32)
    items[:, 0], items[:, 1], items[:, 3] = row_R, 1, num_segments_R
    return items
