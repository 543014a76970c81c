"""HeadMemory: the heads of one expert seat on a GPU, their weights and their KV, in memory that outlives its workers.

    header, words of 8 bytes:  magic | model | pool | pid | born | ... | for each piece: which (layer, head) it is of
    weights, blocks            plan/head_memory.py

The entry of a piece is written when its weights are there, and erased before they change. `model` is a hash of what
decides their bytes. `pool` is the identity of the KV: a number that changes when KV was lost, because the memory is
new, or a piece has got another head. A successor keeps what fits, and streams go on with the KV that is there.

A killed predecessor's queued work may still write to the pool (predecessor.py): nobody is served before it has ended.
"""

import os
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from everserve.backends.cuda.device import Device, tensor_at
from everserve.backends.cuda.lanes.page import page_shape
from everserve.backends.cuda.ops.heads import HeadArena, HeadShape
from everserve.backends.cuda.predecessor import Ended, born_at
from everserve.memory.device import Mapping
from everserve.model.fingerprint import expert_identity
from everserve.model.layout import Weights
from everserve.model.rope import rope_tables
from everserve.plan.head_memory import HEADER_BYTES, HeadMemoryPlan
from everserve.tables.calls import ShardKind

_MAGIC = 0x7364616568  # "heads"
_MAGIC_AT, _MODEL_AT, _POOL_AT, _PID_AT, _BORN_AT, _PIECES_AT = 0, 1, 2, 3, 4, 8  # words
_EMPTY = 0
Head = tuple[int, int]  # layer, number


class NoPieceError(RuntimeError):
    """All pieces have heads that are in use."""


class HeadMemory:
    """Takes over the descriptor. `arena` is what kernels see; whoever fills slots writes its `piece_LS`."""

    def __init__(self, device: Device, fd: int) -> None:
        start, model = device.start, device.model
        self._device = device
        assert start.capacity.devices is not None, "divided heads have devices"
        shape = head_shape(device)
        self.plan = HeadMemoryPlan.of(model, start.capacity.head_pieces, shape.num_blocks, shape.block_size)
        assert 8 * (_PIECES_AT + self.plan.num_pieces) <= HEADER_BYTES, "more heads than a header has room for"
        self._mapping = Mapping(device.driver, fd, self.plan.num_bytes)
        os.close(fd)
        self._predecessor = Ended(self._word(_PID_AT), self._word(_BORN_AT))
        self._claim()
        address = self._mapping.address
        self._weights = tensor_at(address + self.plan.weights_at, self.plan.weights_shape)
        self.arena = HeadArena(
            shape,
            self._weights,
            tensor_at(address + self.plan.blocks_at, self.plan.pool_shape),
            rope_tables(model.rope, model.head_size, device.sizes.max_model_len, device.torch_device),
            load_norms(device),
            len(model.calls),
            start.capacity.lane_slots,
            device.lane_shape.max_rows,
            page_shape(model, start.settings.engine),
        )
        self._in_use: set[Head] = set()

    @property
    def pool(self) -> int:
        return self._word(_POOL_AT)

    def own(self) -> None:
        """Wait until the predecessor's work is over. This process writes into the pool from now on."""
        self._predecessor.wait()
        self._set(_PID_AT, 0)
        self._set(_BORN_AT, born_at(os.getpid()) or 0)
        self._set(_PID_AT, os.getpid())

    def keep(self, heads: Sequence[Head]) -> None:
        """These are the heads of this worker: their pieces are not given to others."""
        self._in_use.update(heads)

    def has(self, head: Head) -> bool:
        return _entry(head) in self._entries()

    def load(self, head: Head) -> int:
        """Have its weights in a piece, from the files unless they are there; the piece. If that was another head's, KV
        is lost. Nothing that reads it may be running or queued."""
        self._in_use.add(head)
        entries = self._entries()
        if _entry(head) in entries:
            return entries.index(_entry(head))
        kept = {_entry(other) for other in self._in_use}
        free = sorted((entry for entry in set(entries) if entry not in kept), key=lambda entry: entry != _EMPTY)
        if not free:
            raise NoPieceError(f"layer {head[0]}, head {head[1]}: all {len(entries)} pieces have other heads")
        piece = entries.index(free[0])
        if free[0] != _EMPTY:
            self._set(_POOL_AT, _new_identity())
        self._set(_PIECES_AT + piece, _EMPTY)
        self._fill(piece, head)
        self._set(_PIECES_AT + piece, _entry(head))
        return piece

    def give_up(self, head: Head) -> None:
        """It is not served here any more. What it had stays until its piece is needed."""
        self._in_use.discard(head)

    def _fill(self, piece: int, head: Head) -> None:
        device = self._device
        weights = Weights(device.model, device.checkpoint, "bfloat16", device.torch_device)
        first = piece * self.plan.width
        for source in weights.layout.head(*head).qkv:
            part = weights.load_temporary(source)
            self._weights[first : first + len(part)].copy_(part)
            first += len(part)
        torch.cuda.synchronize(device.torch_device)

    def _claim(self) -> None:
        """Memory that is new, or of another model, has nothing."""
        source = self._device.start.settings.model
        files = f"{source.load_format}:{source.directory}:{source.fingerprint}"
        model = int.from_bytes(expert_identity(files, self._device.model, "bfloat16")[:8], "little") >> 1
        if (self._word(_MAGIC_AT), self._word(_MODEL_AT)) != (_MAGIC, model):
            self._device.driver.fill(self._mapping.address, HEADER_BYTES, 0)
            self._set(_POOL_AT, _new_identity())
            self._set(_MODEL_AT, model)
            self._set(_MAGIC_AT, _MAGIC)

    def _entries(self) -> list[int]:
        address, num = self._mapping.address + 8 * _PIECES_AT, self.plan.num_pieces
        entries: list[int] = np.frombuffer(self._device.driver.read(address, 8 * num), np.int64).tolist()
        return entries

    def _word(self, at: int) -> int:
        return int.from_bytes(self._device.driver.read(self._mapping.address + 8 * at, 8), "little", signed=True)

    def _set(self, at: int, value: int) -> None:
        self._device.driver.write(self._mapping.address + 8 * at, value.to_bytes(8, "little", signed=True))


def head_shape(device: Device) -> HeadShape:
    model, start = device.model, device.start
    assert start.capacity.devices is not None, "divided heads have devices"
    return HeadShape(
        model.num_kv_heads,
        model.num_heads // model.num_kv_heads,
        model.head_size,
        model.hidden_size,
        model.rms_norm_eps,
        start.settings.engine.block_size,
        device.sizes.num_blocks,
        start.capacity.devices,
    )


def load_norms(device: Device) -> Tensor | None:
    """[call, 2, E]: of q and k, if the model has them."""
    model = device.model
    if not model.qk_norm:
        return None
    weights = Weights(model, device.checkpoint, "bfloat16", device.torch_device)
    norms_L2E = torch.ones(len(model.calls), 2, model.head_size, dtype=torch.bfloat16, device=device.torch_device)
    for layer, call in model.numbers_of(ShardKind.HEAD).items():
        sources = weights.layout.attention(layer)
        for i, source in enumerate((sources.q_norm, sources.k_norm)):
            assert source is not None
            norms_L2E[call, i].copy_(weights.load_temporary(source))
    return norms_L2E


def _entry(head: Head) -> int:
    layer, number = head
    return (layer << 32) + number + 1


def _new_identity() -> int:
    return secrets.randbits(62) + 1
