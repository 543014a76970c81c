"""Staging: a step's rows on their way to the device, in one copy.

    host side 0, 1  --copy-->  arrived  --take_in.py-->  batch, which graphs read
    filled in turns            one of them

If steps are launched ahead, two of them are on their way. The copy of the second comes when the first has ended, or
has stopped in the middle and still needs its rows: so a step takes its rows from where they arrived when it begins,
unless it is stopped. And the host may fill a side while the copy of the other one is still to come. Otherwise graphs
read where rows arrive.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from everserve.backends.cuda.device_batch import NUM_COUNTS, SEGMENT, DeviceBatch, Items, cut
from everserve.engine.batching import Rows
from everserve.model.sampling import GREEDY

_NUMBERS_OF_A_DRAW = len(GREEDY)


class Staging:
    """The rows of one bucket: `num_rows` at most, of at most `num_seqs` sequences.

    `is_mixed`: prompts may be among them; else every sequence has exactly one row. `group`: query heads per KV head.
    `launches_ahead`: the rows of another step may arrive while these are in use.
    """

    def __init__(
        self, num_rows: int, num_seqs: int, max_blocks: int, block_size: int, group: int, is_mixed: bool,
        device: torch.device, launches_ahead: bool = True,
    ) -> None:  # fmt: skip
        self.num_rows = num_rows
        self.num_seqs = min(num_rows, num_seqs)
        self.is_mixed = is_mixed
        max_segments = -(-max_blocks * block_size // SEGMENT)
        sizes = {
            "counts": NUM_COUNTS,
            "tokens": num_rows,
            "positions": num_rows,
            "kv_slots": num_rows,
            "row_seqs": num_rows,
            "sources": num_rows,
            "logits_rows": self.num_seqs,
            "draws": 2 * _NUMBERS_OF_A_DRAW * self.num_seqs,
            "small": 4 * self.num_seqs * max_segments,
            "large": 4 * num_rows if is_mixed else 0,
            "tables": self.num_seqs * max_blocks,
        }
        self.spans: dict[str, slice] = {}
        at = 0
        for name, size in sizes.items():
            self.spans[name] = slice(at, at + size)
            at += _up(size)
        self._sides = [_HostSide(self.spans, self.num_seqs, group, is_mixed, at, device) for _ in range(2)]
        self.arrived_words = self.words = torch.zeros(at, dtype=torch.int32, device=device)
        if launches_ahead:
            self.words = torch.zeros_like(self.arrived_words)
        self._tables: NDArray[np.int32] | None = None  # that have arrived
        self.arrived = self._batch_in(self.arrived_words)
        self.batch = self._batch_in(self.words)
        self.draws_L5 = self.words[self.spans["draws"]].view(torch.float64).view(-1, _NUMBERS_OF_A_DRAW)
        self.clear()

    def fill(self, rows: Rows) -> None:
        """Bring these rows to the device, in the order of its current stream.

        What is the very same array as before lies there already (batching.py: BatchLayout).
        """
        side = self._sides[0]
        self._sides.reverse()
        end = side.fill(rows)
        if rows.block_tables_SB is not self._tables:
            self._tables = rows.block_tables_SB
            end = self.spans["tables"].start + side.num_table_words
        self.arrived_words[:end].copy_(side.words[:end], non_blocking=True)

    def clear(self) -> None:
        """Nothing but padding."""
        self._tables = None
        for side in self._sides:
            side.clear()
        for words in (self.arrived_words, self.words):
            words.copy_(self._sides[0].words)

    def _batch_in(self, words: torch.Tensor) -> DeviceBatch:
        of = {name: words[span] for name, span in self.spans.items()}
        counts = of["counts"]
        large = Items(items_W4=of["large"].view(-1, 4), num_items=counts[1:2]) if self.is_mixed else None
        return DeviceBatch(
            tokens_T=of["tokens"],
            positions_T=of["positions"],
            kv_slots_T=of["kv_slots"],
            query_starts_S=of["tokens"][:0],
            block_tables_SB=of["tables"].view(self.num_seqs, -1),
            logits_rows_L=of["logits_rows"],
            row_seqs_T=of["row_seqs"],
            small=Items(items_W4=of["small"].view(-1, 4), num_items=counts[0:1]),
            large=large,
        )


class _HostSide:
    """The same layout in pinned host memory, and what it was filled with last."""

    def __init__(
        self, spans: dict[str, slice], num_seqs: int, group: int, is_mixed: bool, size: int, device: torch.device
    ) -> None:
        self.words = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.num_table_words = 0  # of the tables that it was filled with
        self._num_seqs = num_seqs
        self._group = group
        self._is_mixed = is_mixed
        self._views = {name: self.words.numpy()[span] for name, span in spans.items()}
        self._draws_L5 = self._views["draws"].view(np.float64).reshape(num_seqs, _NUMBERS_OF_A_DRAW)
        self._tables_SB = self._views["tables"].reshape(num_seqs, -1)
        self._end_of_large: int = spans["large"].stop
        self._first_of_small: int = spans["small"].start
        self._filled: Rows | None = None
        self._has_draws = False
        self._num_items = (0, 0)
        self._segments: NDArray[np.int32] = np.empty(0, np.int32)  # of each row: the one that it is in

    def fill(self, rows: Rows) -> int:
        """Returns where what is in use ends, not counting the block tables."""
        num_rows, num_seqs = len(rows.tokens_T), len(rows.block_tables_SB)
        assert num_rows <= len(self._views["tokens"]) and num_seqs <= self._num_seqs
        before, self._filled = self._filled, rows
        views, is_other_form = self._views, before is None or rows.query_starts_S is not before.query_starts_S
        _put(views["tokens"], rows.tokens_T, 0)
        _put(views["positions"], rows.positions_T, -1)
        _put(views["kv_slots"], rows.kv_slots_T, -1)
        _put(views["sources"], rows.sources_T if rows.sources_T is not None else rows.tokens_T[:0], -1)
        self._put_draws(rows)
        if is_other_form:
            wanted = rows.logits_rows_L[: self._num_seqs]  # more than that: the caller has to ask for them afterwards
            _put(views["row_seqs"], _row_seqs(rows), 0)
            _put(views["logits_rows"], np.array(wanted, np.int32), 0)
        segments = rows.positions_T // SEGMENT
        if is_other_form or not np.array_equal(segments, self._segments):
            self._segments = segments
            self._put_items(rows)
        if before is None or rows.block_tables_SB is not before.block_tables_SB:
            self._tables_SB[:num_seqs, : rows.block_tables_SB.shape[1]] = rows.block_tables_SB
            self.num_table_words = num_seqs * self._tables_SB.shape[1]
        num_small, num_large = self._num_items
        return self._end_of_large if num_large else self._first_of_small + 4 * num_small

    def clear(self) -> None:
        self._filled = None
        self.words.zero_()
        for name in ("positions", "kv_slots", "sources"):
            self._views[name][:] = -1

    def _put_draws(self, rows: Rows) -> None:
        draws = rows.draws_L
        if draws is not None and draws.count(GREEDY) < len(draws):
            self._draws_L5[: len(draws)] = draws
            self._draws_L5[len(draws) :] = 0
            self._has_draws = True
        elif self._has_draws:
            self._draws_L5[:] = 0
            self._has_draws = False

    def _put_items(self, rows: Rows) -> None:
        small, large = cut(rows.positions_T, rows.query_starts_S, self._group, self._num_seqs)
        assert self._is_mixed or not len(large)
        self._num_items = len(small), len(large)
        self._views["counts"][:2] = self._num_items
        self._views["small"][: small.size] = small.reshape(-1)
        self._views["large"][: large.size] = large.reshape(-1)


def _row_seqs(rows: Rows) -> NDArray[np.int32]:
    """Which sequence each row is of."""
    num_seqs = len(rows.block_tables_SB)
    if len(rows.tokens_T) == num_seqs:  # a row each
        return rows.query_starts_S[:-1]
    return np.repeat(np.arange(num_seqs, dtype=np.int32), np.diff(rows.query_starts_S))


def _put(view: NDArray[np.int32], values: NDArray[np.int32], padding: int) -> None:
    view[: len(values)] = values
    view[len(values) :] = padding


def _up(size: int, unit: int = 32) -> int:
    """128 bytes: every view may be read in wide pieces."""
    return -(-size // unit) * unit
