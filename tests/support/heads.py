"""Head halves on memory of our own, and requests to them without a lane."""

import ctypes
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from everserve.memory.kv_pieces import KvPieces, KvShape
from everserve.memory.owned import create_memory
from everserve.memory.pieces.parity_layout import ParityShape
from everserve.model.batch import StepBatch
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.head_half import HeadHalf
from everserve.model.ops import HeadOps, HeadRequest
from everserve.model.weights import Weights

Identity = tuple[int, int]  # layer, head
BLOCK_SIZE = 16


class PoolMemory:
    """Memory that outlives its users."""

    def __init__(self, config: ModelConfig, num_blocks: int, num_pieces: int, item_bytes: int = 4) -> None:
        self.shape = KvShape(num_blocks, max(num_pieces, 1), 2 * BLOCK_SIZE * config.head_size * item_bytes, BLOCK_SIZE)
        self.fd = create_memory("kv-pieces", self.shape.num_bytes)
        self.mirror_fd: int | None = None
        self.parity_fd: int | None = None
        self.parity_shape: ParityShape | None = None
        self.now_s = 0.0  # for what waits for a while

    def mirrored(self) -> "PoolMemory":
        self.mirror_fd = create_memory("kv-mirror", self.shape.mirrored.num_bytes)
        return self

    def with_parity(self, num_homes: int, num_workers: int) -> "PoolMemory":
        self.parity_shape = ParityShape(self.shape, num_homes, max_members=num_workers - 1)
        self.parity_fd = create_memory("kv-parity", self.parity_shape.num_bytes)
        return self

    def forget(self) -> None:
        """The memory is lost, but not its mirror."""
        os.close(self.fd)
        self.fd = create_memory("kv-pieces", self.shape.num_bytes)
        if self.parity_fd is not None:
            os.close(self.parity_fd)
            self.parity_fd = create_memory("kv-parity", self.parity_shape.num_bytes)


def head_half(
    directory: Path, ops: HeadOps, heads: Iterable[Identity], memory: PoolMemory, dtype: str = "auto"
) -> HeadHalf:
    """These heads, in slots from 0 on in each layer."""
    config, checkpoint = ModelConfig.from_directory(str(directory)), Checkpoint.open(str(directory))
    kv = KvPieces(
        memory.fd, memory.shape, memory.mirror_fd, memory.parity_fd, memory.parity_shape, clock=lambda: memory.now_s
    )
    kv_dtype = Weights(config, checkpoint, dtype, ops.device).dtype
    shape = (memory.shape.num_blocks, memory.shape.num_pieces, 2, BLOCK_SIZE, config.head_size)
    pool = torch.frombuffer(kv.blocks, dtype=kv_dtype).view(shape)
    half = HeadHalf(config, checkpoint, ops, config.num_kv_heads, config.max_position_embeddings, kv, pool, dtype)
    slots: dict[int, int] = {}
    for layer, head in heads:
        half.load(layer, head, slots.setdefault(layer, 0))
        slots[layer] += 1
    return half


def attend(half: HeadHalf, layer: int, heads: Sequence[int], requests: Sequence[tuple[Tensor, StepBatch]]) -> list:
    """attended rows [T, heads, M * E] of each request, computed in one call."""
    held = list(half.held[layer])
    slots = (ctypes.c_int32 * len(heads))(*(held.index(head) for head in heads))
    pieces = (ctypes.c_int32 * len(heads))(*(half.pieces[layer][slot] for slot in slots))
    answers = [torch.full((len(x), len(heads), half.answer_size), float("nan")) for x, _ in requests]
    table = (HeadRequest * len(requests))()
    for request, (x, batch), y in zip(table, requests, answers, strict=True):
        request.x, request.y = x.data_ptr(), y.data_ptr()
        request.positions, request.kv_slots = batch.positions_T.data_ptr(), batch.kv_slots_T.data_ptr()
        request.query_starts = batch.query_starts_S.data_ptr()
        request.block_tables = batch.block_tables_SB.data_ptr()
        request.slots, request.pieces = ctypes.addressof(slots), ctypes.addressof(pieces)
        request.num_rows, request.num_sequences = len(x), batch.num_seqs
        request.table_width, request.num_heads = batch.block_tables_SB.shape[1], len(heads)
    half.rows_at(layer, ctypes.addressof(table), len(table))
    return answers


class ManyHalves:
    """`Heads` by some head halves in this process: each head by the half that has it."""

    def __init__(self, halves: Sequence[HeadHalf]) -> None:
        self._halves = halves

    def __call__(self, layer: int, normed_TD: Tensor, batch: StepBatch) -> Tensor:
        found: dict[int, Tensor] = {}
        for half in self._halves:
            heads = [head for head in half.held[layer] if head >= 0]
            if heads:
                (y,) = attend(half, layer, heads, [(normed_TD, batch)])
                found.update((head, y[:, j]) for j, head in enumerate(heads))
        return torch.cat([found[head] for head in sorted(found)], dim=1)
