"""Scheduled chunks to the rows of a step: laid out as arrays, then as the tensors of a StepBatch."""

from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from everserve.engine.sequence import Chunk, Sequence
from everserve.model.batch import StepBatch
from everserve.model.choosing import Draw


class Rows(NamedTuple):
    """Rows as in StepBatch, on the host.

    sources_T: in a step that is launched ahead, the row of the step before whose choice is this row's token. `tokens_T`
    has no meaning then.
    draws_L: how the token of each row with logits is chosen. None: by the caller, who looks at the logits.
    """

    tokens_T: NDArray[np.int32]
    positions_T: NDArray[np.int32]
    kv_slots_T: NDArray[np.int32]
    query_starts_S: NDArray[np.int32]
    block_tables_SB: NDArray[np.int32]
    logits_rows_L: list[int]
    sources_T: NDArray[np.int32] | None = None
    draws_L: list[Draw] | None = None


class BatchLayout:
    """`lay_out` for an engine, most of whose steps are the last one again, one token further: the scheduler then says
    so by the very same list.

    Arrays are never changed once they were returned, and as long as they hold the same arrays are returned again: a
    caller that has copied them to the device need not copy them again (staging.py).
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._chunks: list[Chunk] | None = None
        self._rows: Rows
        self._sequences: list[Sequence] = []
        self._last_blocks: list[int] = []

    def __call__(self, chunks: list[Chunk], num_ahead: list[int] | None = None) -> Rows:
        """`num_ahead`: of each chunk's stream, how many tokens are being computed in a step that has not ended. The
        chunk is what comes after these, one token that is not known."""
        if chunks is self._chunks:
            self._rows = self._go_on(self._rows, num_ahead)
        else:
            self._chunks = chunks
            self._sequences = [chunk[0] for chunk in chunks]
            self._last_blocks = [sequence.blocks[-1] for sequence in self._sequences]
            self._rows = lay_out(chunks, self._block_size, num_ahead)
        return self._rows

    def _go_on(self, before: Rows, num_ahead: list[int] | None) -> Rows:
        """Every stream is one token further. A stream's block table has changed by one more block at most."""
        sequences, block_size, tables = self._sequences, self._block_size, before.block_tables_SB
        last_blocks = [sequence.blocks[-1] for sequence in sequences]
        if last_blocks != self._last_blocks:
            tables = self._extended(tables)
            self._last_blocks = last_blocks
        positions = before.positions_T + 1
        assert positions[-1] == sequences[-1].num_computed + (num_ahead[-1] if num_ahead is not None else 0)
        blocks = tables[before.query_starts_S[:-1], positions // block_size]
        tokens = before.tokens_T  # of no meaning
        if num_ahead is None:
            tokens = np.array([sequence.tokens[-1] for sequence in sequences], np.int32)
        return before._replace(
            tokens_T=tokens,
            positions_T=positions,
            kv_slots_T=blocks * block_size + positions % block_size,
            block_tables_SB=tables,
        )

    def _extended(self, before: NDArray[np.int32]) -> NDArray[np.int32]:
        assert self._chunks is not None
        if max(len(sequence.blocks) for sequence in self._sequences) > before.shape[1]:
            return _tables(self._chunks)
        tables = before.copy()
        for i, (sequence, last) in enumerate(zip(self._sequences, self._last_blocks, strict=True)):
            if sequence.blocks[-1] != last:
                tables[i, len(sequence.blocks) - 1] = sequence.blocks[-1]
        return tables


def lay_out(chunks: list[Chunk], block_size: int, num_ahead: list[int] | None = None) -> Rows:
    """The rows of all chunks, one after the other, and which rows' logits are wanted. `num_ahead` as in BatchLayout."""
    if all(chunk.num_tokens == 1 for chunk in chunks):
        return _lay_out_single(chunks, block_size, num_ahead)
    assert num_ahead is None, "prompts are not computed ahead"
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    tokens = np.empty(num_tokens, np.int32)
    positions = np.empty(num_tokens, np.int32)
    kv_slots = np.empty(num_tokens, np.int32)
    tables = _tables(chunks)
    query_starts = np.zeros(len(chunks) + 1, np.int32)
    logits_rows: list[int] = []
    row = 0
    for i, chunk in enumerate(chunks):
        sequence, num = chunk.sequence, chunk.num_tokens
        first, end = sequence.num_computed, row + num
        position = np.arange(first, first + num, dtype=np.int32)
        if chunk.drafts:
            tokens[row], tokens[row + 1 : end] = sequence.tokens[first], chunk.drafts
        else:
            tokens[row:end] = sequence.tokens[first : first + num]
        positions[row:end] = position
        kv_slots[row:end] = tables[i, position // block_size] * block_size + position % block_size
        logits_rows.extend(wanted_rows(chunk, row))
        row = query_starts[i + 1] = end
    return Rows(tokens, positions, kv_slots, query_starts, tables, logits_rows)


def _lay_out_single(chunks: list[Chunk], block_size: int, num_ahead: list[int] | None) -> Rows:
    """The same for chunks of one token each: between two tokens of every stream there is little time."""
    positions = [chunk[0].num_computed for chunk in chunks]
    if num_ahead is None:
        tokens = [chunk[0].tokens[at] for chunk, at in zip(chunks, positions, strict=True)]
    else:
        positions = [at + num for at, num in zip(positions, num_ahead, strict=True)]
        tokens = [0] * len(chunks)
    kv_slots = [
        chunk[0].blocks[at // block_size] * block_size + at % block_size
        for chunk, at in zip(chunks, positions, strict=True)
    ]
    return Rows(
        tokens_T=np.array(tokens, np.int32),
        positions_T=np.array(positions, np.int32),
        kv_slots_T=np.array(kv_slots, np.int32),
        query_starts_S=np.arange(len(chunks) + 1, dtype=np.int32),
        block_tables_SB=_tables(chunks),
        logits_rows_L=[i for i, chunk in enumerate(chunks) if chunk[2] or wanted_rows(chunk, i)],
    )


def _tables(chunks: list[Chunk]) -> NDArray[np.int32]:
    """The blocks of each chunk's sequence, and zeros."""
    blocks = [chunk[0].blocks for chunk in chunks]
    width = max(map(len, blocks))
    zeros = [0] * width
    lines = [line + zeros[len(line) :] for line in blocks]
    return np.array(list(chain.from_iterable(lines)), np.int32).reshape(len(chunks), width)


def to_batch(rows: Rows, device: torch.device) -> StepBatch:
    return StepBatch(
        tokens_T=_tensor(rows.tokens_T, device),
        positions_T=_tensor(rows.positions_T, device),
        kv_slots_T=_tensor(rows.kv_slots_T, device),
        query_starts_S=_tensor(rows.query_starts_S, device),
        block_tables_SB=_tensor(rows.block_tables_SB, device),
        logits_rows_L=torch.tensor(rows.logits_rows_L, dtype=torch.int64, device=device),
    )


def wanted_rows(chunk: Chunk, first_row: int) -> range:
    """The rows whose logits this chunk needs: its last one if that gives a token, all of them for prompt logprobs or
    with drafts.

    Row j of a prompt predicts prompt token j + 1; so all rows of the chunk but a completing last one are needed for
    prompt logprobs, and that last one gives the first output token.
    """
    end = first_row + chunk.num_tokens
    if chunk.drafts or chunk.sequence.wants_prompt_logprobs:
        return range(first_row, end)
    return range(end - 1, end) if chunk.completes else range(0)


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)  # asking costs as much as making it
