"""Staging: a step's rows on their way to the device, in one copy.

One buffer in pinned host memory, one of the same layout on the device; numpy views of the first are filled, tensor
views of the second are what graphs read.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from everserve.backends.cuda.device_batch import NUM_COUNTS, SEGMENT, DeviceBatch, Items, cut
from everserve.engine.batching import Rows


class Staging:
    """The rows of one bucket: `num_rows` at most, of at most `num_seqs` sequences.

    `is_mixed`: prompts may be among them; else every sequence has exactly one row. `group`: query heads per KV head.
    """

    def __init__(
        self, num_rows: int, num_seqs: int, max_blocks: int, block_size: int, group: int, is_mixed: bool,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.num_rows = num_rows
        self.num_seqs = min(num_rows, num_seqs)
        self.is_mixed = is_mixed
        self._group = group
        max_segments = -(-max_blocks * block_size // SEGMENT)
        max_large = num_rows if is_mixed else 0
        sizes = {
            "counts": NUM_COUNTS,
            "tokens": num_rows,
            "positions": num_rows,
            "kv_slots": num_rows,
            "row_seqs": num_rows,
            "logits_rows": self.num_seqs,
            "small": 4 * self.num_seqs * max_segments,
            "large": 4 * max_large,
            "tables": self.num_seqs * max_blocks,
        }
        total = sum(_up(size) for size in sizes.values())
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        self._spans: dict[str, slice] = {}
        at = 0
        for name, size in sizes.items():
            self._spans[name] = slice(at, at + size)
            at += _up(size)
        self._views = {name: self._host.numpy()[span] for name, span in self._spans.items()}
        self._tables = self._views["tables"].reshape(self.num_seqs, max_blocks)
        self._filled: Rows | None = None  # in the last step
        self._segments: NDArray[np.int32] = np.empty(0, np.int32)  # of each of these rows: the one that it is in
        self._from, self._to = self._host, self._device  # as much of both as they take
        self.batch = self._make_batch(max_blocks)

    def fill(self, rows: Rows) -> None:
        """Bring these rows to the device, in the order of its current stream.

        What is the very same array as in the last step lies here already (batching.py: Layout).
        """
        num_rows, num_seqs = len(rows.tokens_T), len(rows.block_tables_SB)
        assert num_rows <= self.num_rows and num_seqs <= self.num_seqs
        before, self._filled = self._filled, rows
        views, is_other_form = self._views, before is None or rows.query_starts_S is not before.query_starts_S
        _put(views["tokens"], rows.tokens_T, 0)
        _put(views["positions"], rows.positions_T, -1)
        _put(views["kv_slots"], rows.kv_slots_T, -1)
        if is_other_form:
            wanted = rows.logits_rows_L[: self.num_seqs]  # more than that: the caller has to ask for them afterwards
            _put(views["row_seqs"], _row_seqs(rows), 0)
            _put(views["logits_rows"], np.array(wanted, np.int32), 0)
        segments = rows.positions_T // SEGMENT
        if is_other_form or not np.array_equal(segments, self._segments):
            self._segments = segments
            self._put_items(rows)
        if before is None or rows.block_tables_SB is not before.block_tables_SB:
            self._tables[:num_seqs, : rows.block_tables_SB.shape[1]] = rows.block_tables_SB
            end = self._spans["tables"].start + num_seqs * self._tables.shape[1]
            self._from, self._to = self._host[:end], self._device[:end]
        self._to.copy_(self._from, non_blocking=True)

    def _put_items(self, rows: Rows) -> None:
        small, large = cut(rows.positions_T, rows.query_starts_S, self._group, self.num_seqs)
        assert self.is_mixed or not len(large)
        self._views["counts"][:2] = (len(small), len(large))
        self._views["small"][: small.size] = small.reshape(-1)
        self._views["large"][: large.size] = large.reshape(-1)

    def _make_batch(self, max_blocks: int) -> DeviceBatch:
        of = self._tensor
        counts = of("counts")
        large = Items(items_W4=of("large").view(-1, 4), num_items=counts[1:2]) if self.is_mixed else None
        self.clear()
        return DeviceBatch(
            tokens_T=of("tokens"),
            positions_T=of("positions"),
            kv_slots_T=of("kv_slots"),
            query_starts_S=of("tokens")[:0],
            block_tables_SB=of("tables").view(self.num_seqs, max_blocks),
            logits_rows_L=of("logits_rows"),
            row_seqs_T=of("row_seqs"),
            small=Items(items_W4=of("small").view(-1, 4), num_items=counts[0:1]),
            large=large,
        )

    def clear(self) -> None:
        """Nothing but padding."""
        self._filled = None
        self._host.zero_()
        for name in ("positions", "kv_slots"):
            self._views[name][:] = -1
        self._device.copy_(self._host)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._device[self._spans[name]]


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
