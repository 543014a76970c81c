"""attend against the reference, and a row bit for bit against itself: prefilled, decoded, and split into segments."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from everserve.backends.cpu.reference import ReferenceOps
from everserve.backends.cuda.device_batch import LARGE, SEGMENT, DeviceBatch, Items, cut
from everserve.backends.cuda.ops import attention
from everserve.backends.cuda.ops.attention import Workspace, attend
from everserve.model.batch import StepBatch
from everserve.model.ops import Scores

reference = ReferenceOps()
LAYER, NUM_LAYERS = 1, 3
WHOLE = slice(None)


class Sequences:
    """Stored keys and values of some sequences, NaN everywhere else, and a query for every token."""

    def __init__(self, device, lengths: list[int], heads: int, kv_heads: int, size: int, block_size: int) -> None:
        self.device, self.heads, self.kv_heads, self.size = device, heads, kv_heads, size
        widths = [-(-length // block_size) for length in lengths]
        blocks = torch.randperm(sum(widths) + 3, dtype=torch.int32)
        self.tables = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
        pool = torch.full((len(blocks), NUM_LAYERS, 2, kv_heads, block_size, size), math.nan)
        for seq, (own, length) in enumerate(zip(blocks.split([*widths, 3]), lengths, strict=False)):
            self.tables[seq, : len(own)] = own
            at = torch.arange(length)
            block, offset = own[at // block_size].long(), at % block_size
            pool[block, LAYER, :, :, offset] = torch.randn(length, 2, kv_heads, size)
        self.pool = pool.bfloat16().to(device)
        self.queries = [torch.randn(length, heads, size).bfloat16() for length in lengths]

    def rows(self, pieces: list[tuple[int, int, int]]) -> tuple[StepBatch, Tensor]:
        """Rows first..end of sequences as the reference wants them, and their queries."""
        positions = torch.cat([torch.arange(first, end) for _, first, end in pieces]).int()
        starts = torch.tensor([0] + [end - first for _, first, end in pieces]).cumsum(0).int()
        nothing = torch.zeros(len(positions), dtype=torch.int32)
        batch = StepBatch(
            tokens_T=nothing,
            positions_T=positions.to(self.device),
            kv_slots_T=nothing,
            query_starts_S=starts,
            block_tables_SB=self.tables[[s for s, _, _ in pieces]].to(self.device),
            logits_rows_L=nothing[:0],
        )
        return batch, torch.cat([self.queries[s][first:end] for s, first, end in pieces]).to(self.device)

    def expected(self, pieces: list[tuple[int, int, int]]) -> Tensor:
        batch, q = self.rows(pieces)
        return reference.attend(q.float(), batch, self.pool, LAYER, Scores(self.size**-0.5))

    def attend(self, stop, pieces: list[tuple[int, int, int]], small=None, large=None, padding: int = 0) -> Tensor:
        """With items as given, or as `cut` makes them."""
        batch, q = self.rows(pieces)
        if small is None:
            positions, starts = batch.positions_T.cpu().numpy(), batch.query_starts_S.numpy()
            small, large = cut(positions, starts, self.heads // self.kv_heads, max_split=len(positions))
        of_row = torch.arange(len(pieces)).repeat_interleave(batch.query_starts_S.diff()).int()
        padded = torch.nn.functional.pad
        device_batch = DeviceBatch(
            **{**vars(batch), "positions_T": padded(batch.positions_T, (0, padding), value=-1)},
            row_seqs_T=padded(of_row, (0, padding)).to(self.device),
            small=self._items(small),
            large=None if large is None else self._items(large),
        )
        q = torch.cat([q, torch.full((padding, *q.shape[1:]), math.nan, dtype=q.dtype, device=q.device)])
        workspace = Workspace(len(q), 4, self.heads, self.size, self.device)
        return attend(q, device_batch, self.pool, LAYER, Scores(self.size**-0.5), workspace, stop)

    def _items(self, items) -> Items:
        """With room for two more, which must not be looked at."""
        table = torch.from_numpy(np.array([*items, [-9] * 4, [-9] * 4], np.int32)).to(self.device)
        return Items(items_W4=table, num_items=torch.tensor([len(items)], dtype=torch.int32, device=self.device))


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual.float() - expected).abs().max() <= 2**-7 * expected.abs().max()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size"),
    [(4, 4, 16, 16), (8, 2, 64, 32), (6, 2, 32, 16), (7, 1, 32, 64), (32, 1, 16, 16), (2, 1, 256, 128)],
)
def test_attend(device, stop, heads, kv_heads, size, block_size, monkeypatch):
    if kv_heads > 1:  # a program merges several rows
        monkeypatch.setattr(attention, "MANY_ROWS", 1)
    sequences = Sequences(device, [70, 1, SEGMENT + 1, 600], heads, kv_heads, size, block_size)
    pieces = [(0, 30, 70), (1, 0, 1), (2, SEGMENT, SEGMENT + 1), (3, 598, 600)]
    out = sequences.attend(stop, pieces, padding=3)
    close(out[:-3], sequences.expected(pieces))
    assert out.dtype is torch.bfloat16 and (out[-3:] == 0).all()


def test_prefill_decode_and_segments_give_the_same_bits(device, stop):
    """Rows on both sides of the end of a segment, computed in every way there is."""
    first, end = 2 * SEGMENT - 3, 2 * SEGMENT + 3
    sequences = Sequences(device, [end, 40], 4, 1, 32, 16)
    rows = range(end - first)
    num_segments = [(first + row) // SEGMENT + 1 for row in rows]
    whole = sequences.attend(stop, [(0, first, end)], small=[], large=[(0, 6, 0, 3)])
    close(whole, sequences.expected([(0, first, end)]))
    ways = {
        "short of 64 query rows": ([], [(0, 2, 0, 2), (2, 1, 0, 2), (3, 3, 0, 3)]),
        "small items of several rows": ([(0, 4, 0, 3), (4, 2, 0, 3)], []),
        "one small item per row": ([(row, 1, 0, num_segments[row]) for row in rows], None),
        "one per segment": ([(row, 1, segment, 1) for row in rows for segment in range(num_segments[row])], None),
    }
    for name, (small, large) in ways.items():
        assert torch.equal(sequences.attend(stop, [(0, first, end)], small, large), whole), name
    for num_drafts in (1, 3, 5):  # rows that are verified beside streams that decode
        verified = sequences.attend(stop, [(1, 30, 31), (0, first, first + 1 + num_drafts)])
        assert torch.equal(verified[1:], whole[: 1 + num_drafts])
    for row in rows:  # decoded alone, in company, and after padding
        at = first + row
        assert torch.equal(sequences.attend(stop, [(0, at, at + 1)])[0], whole[row])
        assert torch.equal(sequences.attend(stop, [(1, 7, 30), (0, at, at + 1)], padding=2)[23], whole[row])


def test_a_chunk_of_a_prompt_may_be_cut_anywhere(device, stop):
    sequences = Sequences(device, [100], 6, 2, 16, 16)
    whole = sequences.attend(stop, [(0, 0, 100)])
    close(whole, sequences.expected([(0, 0, 100)]))
    parts = [sequences.attend(stop, [(0, first, end)]) for first, end in [(0, 1), (1, 64), (64, 65), (65, 100)]]
    assert torch.equal(torch.cat(parts), whole)
    assert LARGE // 3 == 21  # so that items end within tiles


def test_nothing_is_written_once_stopped(device, stop, monkeypatch):
    sequences = Sequences(device, [600, 20], 4, 2, 16, 16)
    pieces = [(0, 599, 600), (1, 0, 20)]
    monkeypatch.setattr(torch, "empty", torch.zeros)
    assert sequences.attend(stop, pieces).any(dim=1).all()
    stop.fill_(1)
    assert not sequences.attend(stop, pieces).any()


def test_no_rows(device, stop):
    sequences = Sequences(device, [5], 4, 2, 16, 16)
    assert sequences.attend(stop, [(0, 5, 5)]).shape == (0, 64)


def test_prompts_are_cut_into_items_of_several_rows():
    lengths, firsts, num_rows = [1, 40, 1, 2, 33, 8], [7, SEGMENT - 30, 0, 5, 0, 3 * SEGMENT - 4], LARGE // 8
    positions = np.concatenate([np.arange(a, a + n) for a, n in zip(firsts, lengths, strict=True)]).astype(np.int32)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    small, large = cut(positions, starts, group=8, max_split=1)
    assert small.tolist() == [[0, 1, 0, 1], [41, 1, 0, 1]]
    assert large.tolist() == [
        [first, min(num_rows, end - first), 0, positions[min(first + num_rows, end) - 1] // SEGMENT + 1]
        for start, end in pairwise(starts)
        if end - start > 1
        for first in range(start, end, num_rows)
    ]
