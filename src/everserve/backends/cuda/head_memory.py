"""HeadMemory: the heads of one expert seat on a GPU, their weights and their KV, in memory that outlives its workers.

A table in front of it (head_table.py) says which piece is of which head. A successor keeps what fits, and streams go on
with the KV that is there, when homes have checked it: it has another identity from then on.

A killed predecessor's queued work may still write to the pool (predecessor.py): nothing is served before it has ended.
"""

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from everserve.backends.cuda.device import Device, tensor_at
from everserve.backends.cuda.head_table import HeadTable, new_identity
from everserve.backends.cuda.lanes.page import page_shape
from everserve.backends.cuda.ops.heads import HeadArena, HeadShape
from everserve.backends.cuda.predecessor import Ended, born_at, check_of
from everserve.memory.device import Mapping
from everserve.model.fingerprint import expert_identity
from everserve.model.rope import RopeTables, rope_tables
from everserve.model.spec import Gqa, QkNorm
from everserve.model.weights import Weights
from everserve.plan.head_memory import Head, HeadMemoryPlan
from everserve.tables.calls import ShardKind


class HeadMemory:
    """Takes over the descriptor. `arena` is what kernels see; the code that fills slots writes its `piece_LS`."""

    def __init__(self, device: Device, fd: int) -> None:
        start, model, source = device.start, device.model, device.start.settings.model
        self._device = device
        shape = head_shape(device)
        self._plan = plan = HeadMemoryPlan.of(model, start.capacity.head_pieces, shape.num_blocks, shape.block_size)
        mapping = Mapping(device.driver, fd, plan.num_bytes)
        os.close(fd)
        self._table = HeadTable(device.driver, mapping.address, plan.num_pieces)
        self._predecessor = Ended(*self._table.owner)
        self._next_pool = new_identity()
        files = f"{source.load_format}:{source.directory}:{source.fingerprint}"
        self._table.claim(expert_identity(files, model, "bfloat16"))
        self._weights = tensor_at(mapping.address + plan.weights_at, plan.weights_shape)
        self.arena = HeadArena(
            shape,
            self._weights,
            tensor_at(mapping.address + plan.blocks_at, plan.pool_shape),
            head_tables(device),
            load_norms(device),
            len(model.calls),
            start.capacity.lane_slots,
            device.lane_shape.max_rows,
            page_shape(model, start.settings.engine),
        )

    @property
    def pool(self) -> int:
        """The identity of all KV here. It is told to homes before this process owns the memory."""
        return self._next_pool or self._table.pool

    def own(self) -> None:
        """Wait until the predecessor's work is over. This process writes into the pool from now on."""
        self._predecessor.wait()
        pid, born = os.getpid(), born_at(os.getpid()) or 0
        self._table.own(pid, born, check_of(pid, born), self._next_pool)
        self._next_pool = 0

    def keep(self, heads: Sequence[Head]) -> None:
        """These are the heads of this worker: their pieces are not given to others."""
        self._table.in_use.update(heads)

    def has(self, head: Head) -> bool:
        return self._table.find(head) is not None

    def load(self, head: Head) -> int:
        """Have its weights in a piece, from the files unless they are there; the piece. If that was another head's, KV
        is lost. Nothing that reads it may be running or queued."""
        self._table.in_use.add(head)
        piece = self._table.find(head)
        if piece is None:
            piece = self._table.take(head)
            self._fill(piece, head)
            self._table.complete(piece, head)
        return piece

    def give_up(self, head: Head) -> None:
        """It is not served here any more. What it had stays until its piece is needed."""
        self._table.in_use.discard(head)

    def _fill(self, piece: int, head: Head) -> None:
        device = self._device
        weights = Weights(device.model, device.checkpoint, "bfloat16", device.torch_device)
        first = piece * self._plan.width
        for source in weights.layout.head(*head).qkv:
            part = weights.load_temporary(source)
            self._weights[first : first + len(part)].copy_(part)
            first += len(part)
        torch.cuda.synchronize(device.torch_device)


def head_shape(device: Device) -> HeadShape:
    model, start = device.model, device.start
    assert start.capacity.devices is not None, "divided heads have devices"
    return HeadShape(
        model.num_kv_heads,
        model.num_heads // model.num_kv_heads,
        model.head_size,
        model.hidden_size,
        model.layers[0].norm.eps,
        start.settings.engine.block_size,
        device.sizes.num_blocks,
        start.capacity.devices,
    )


def head_tables(device: Device) -> RopeTables:
    """cos and sin: heads that are divided are all alike."""
    mixer = device.model.layers[0].mixer
    assert isinstance(mixer, Gqa) and mixer.rope is not None and device.model.has_plain_heads
    return rope_tables(mixer.rope, mixer.head_size, device.sizes.max_model_len, device.torch_device)


def load_norms(device: Device) -> Tensor | None:
    """[call, 2, E]: of q and k, if the model has them."""
    model, mixer = device.model, device.model.layers[0].mixer
    if isinstance(mixer, Gqa) and mixer.qk_norm is QkNorm.NONE:
        return None
    weights = Weights(model, device.checkpoint, "bfloat16", device.torch_device)
    norms_L2E = torch.ones(len(model.calls), 2, model.head_size, dtype=torch.bfloat16, device=device.torch_device)
    for layer, call in model.numbers_of(ShardKind.HEAD).items():
        home = weights.home(layer)
        for i, name in enumerate(("q_norm", "k_norm")):
            norms_L2E[call, i].copy_(home.need(name))
    return norms_L2E
