"""Rows of a step that goes on from the last one, and what is filled of them, are what they would be from scratch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everserve.backends.cuda import device_batch, staging
from everserve.backends.cuda.staging import Staging
from everserve.engine import batching
from everserve.engine.batching import BatchLayout, Rows, lay_out
from everserve.engine.sequence import Chunk
from tests.property.test_engine_schedules import events
from tests.support import guides
from tests.support.examples import examples
from tests.support.toy import LaggingForward, StepAbandoned, eager, make_engine, spec

_SEGMENT, _MAX_BLOCKS, _BLOCK_SIZE, _MAX_ROWS = 8, 16, 4, 16


class CheckedLayout:
    """Compares every step, and everything that was given out before, with rows laid out from scratch."""

    def __init__(self, inner: BatchLayout) -> None:
        self._inner = inner
        self._given: list[tuple[Rows, list[np.ndarray]]] = []
        self._staging = _make_staging()

    def __call__(self, chunks: list[Chunk], num_ahead: list[int] | None = None) -> Rows:
        rows = self._inner(chunks, num_ahead)
        expected = lay_out(chunks, _BLOCK_SIZE, num_ahead)
        if num_ahead is not None:
            expected = expected._replace(tokens_T=rows.tokens_T)
        _check_rows(rows, expected)
        for before, copies in self._given[-3:]:
            assert all(map(np.array_equal, before[:5], copies)), "an array that was given out has changed"
        self._given.append((rows, [array.copy() for array in rows[:5]]))
        if len(rows.tokens_T) <= _MAX_ROWS:
            self._staging.fill(rows)
            _check_filled(self._staging, expected, [chunk.sequence.blocks for chunk in chunks])
        return rows


def _make_staging() -> Staging:
    return Staging(_MAX_ROWS, _MAX_ROWS, _MAX_BLOCKS, _BLOCK_SIZE, 2, is_mixed=True, device=torch.device("cpu"))


def _check_rows(rows: Rows, expected: Rows) -> None:
    for name, ours, theirs in zip(Rows._fields[:4], rows, expected, strict=False):
        assert ours.dtype == np.int32 and np.array_equal(ours, theirs), name
    width = expected.block_tables_SB.shape[1]
    assert np.array_equal(rows.block_tables_SB[:, :width], expected.block_tables_SB)
    assert rows.logits_rows_L == expected.logits_rows_L


def _check_filled(ours: Staging, rows: Rows, blocks: list[list[int]]) -> None:
    fresh = _make_staging()
    fresh.fill(rows)
    for name in ("tokens_T", "positions_T", "kv_slots_T", "row_seqs_T", "logits_rows_L"):
        assert torch.equal(getattr(ours.arrived, name), getattr(fresh.arrived, name)), name
    for mine, its in ((ours.arrived.small, fresh.arrived.small), (ours.arrived.large, fresh.arrived.large)):
        num_items = int(its.num_items)
        assert int(mine.num_items) == num_items
        assert torch.equal(mine.items_W4[:num_items], its.items_W4[:num_items])
    for line, expected in zip(ours.arrived.block_tables_SB.tolist(), blocks, strict=False):
        assert line[: len(expected)] == expected


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """So that streams of these lengths cross them."""
    monkeypatch.setattr(device_batch, "SEGMENT", _SEGMENT)
    monkeypatch.setattr(staging, "SEGMENT", _SEGMENT)


@examples(38)
@given(events, st.sampled_from([16, 18, 24]), st.sampled_from([3, 16]), st.sampled_from([eager, LaggingForward]))
def test_rows_are_what_they_would_be_from_scratch(events, num_blocks, budget, make_forward):
    engine, model = make_engine(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_prefill_while_decoding=max(1, budget // 2),
        make_forward=make_forward,
    )
    engine._layout = CheckedLayout(engine._layout)
    num_added = 0
    for event in events:
        if event[0] == "add":
            guides.add(engine, spec(f"r{num_added}", event[1], **event[2]))
            num_added += 1
        elif event[0] == "step":
            for _ in range(event[1]):
                engine.step()
        elif event[0] == "abandon" and engine.has_work:
            model.fail_next = True  # also a step behind which there is another one, or one that was launched ahead
            with pytest.raises(StepAbandoned):
                engine.step()
        elif event[0] == "cancel":
            engine.cancel(f"r{event[1]}")
    while engine.has_work:
        engine.step()


def test_streams_that_go_on_are_not_laid_out_again(monkeypatch):
    """While nobody comes or goes, not even when they need blocks."""
    engine, _ = make_engine(num_blocks=64, max_num_batched_tokens=16)
    for i in range(3):
        engine.add(spec(f"r{i}", list(range(1 + i)), max_tokens=30))
    engine.step()
    num_laid_out = 0

    def counted(*args):
        nonlocal num_laid_out
        num_laid_out += 1
        return lay_out(*args)

    monkeypatch.setattr(batching, "lay_out", counted)
    for _ in range(28):
        engine.step()
    assert num_laid_out == 1, "once, when all of them decode for the first time"
