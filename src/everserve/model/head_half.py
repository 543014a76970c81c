"""HeadHalf: some heads of all layers, and the KV of every stream for them.

    a slot       a place for the weights of one (layer, head); views of the model's files, not copied
    a piece      what each block of the KV pool has of one (layer, head)

The pool is [num_blocks, num_pieces, 2, block_size, E]. A block number means the same on every worker, so a stream's
block table, which its home keeps, holds for all heads of all workers. Which piece belongs to which (layer, head) is
written beside the pool (memory/kv_pieces.py): a successor finds its KV again.

Rows come with everything that they need, and nothing but KV is kept between calls.
"""

import ctypes
from typing import Protocol

from torch import Tensor

from everserve.model.attention_half import scores_of
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.layout import HeadSources
from everserve.model.ops import HeadOps, HeadRequest, HeadWeights
from everserve.model.rope import PositionTables, Rotation
from everserve.model.spec import Gqa
from everserve.model.weights import Weights
from everserve.tables.slots import EMPTY


class KvPool(Protocol):
    """What is needed of the memory that KV is in."""

    @property
    def id_address(self) -> int:
        """Where the pool's identity is: a number that changes when KV was lost."""

    @property
    def num_parking(self) -> int:
        """Blocks that only its mirror has."""

    def piece_of(self, layer: int, head: int) -> int:
        """The piece of this head, from now on. KV of another one may be lost by that, but not silently."""

    def give_up(self, layer: int, head: int) -> None:
        """This head is not served here any more."""

    def sign(self, kv_slots: int, chains: int, num_rows: int, pieces: int, num_pieces: int) -> None:
        """Rows with these chains are stored in these pieces (addresses): certify them."""


class HeadHalf:
    """`num_slots` slots per layer, empty at first; `kv` has a piece for each head that is loaded, `kv_pool` is its
    memory."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: HeadOps,
        num_slots: int,
        max_model_len: int,
        kv: KvPool,
        kv_pool: Tensor,
        dtype: str = "auto",
    ) -> None:
        self.config = config
        self.ops = ops
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.kv = kv
        self.kv_pool = kv_pool
        self.group_size = config.num_heads // config.num_kv_heads
        self._weights = Weights(config, checkpoint, dtype, ops.device, keeps_quantised=ops.device.type == "cpu")
        self._tables = PositionTables(max_model_len, ops.device)
        self._rotations: dict[int, Rotation] = {}
        layers = range(config.num_layers)
        self._slots = {layer: ops.head_slots(num_slots) for layer in layers}
        # By layer, the head in each slot, or EMPTY, and its piece. Code outside Python reads them, so they never move.
        self.held = {layer: (ctypes.c_int32 * num_slots)(*[EMPTY] * num_slots) for layer in layers}
        self.pieces = {layer: (ctypes.c_int32 * num_slots)(*[EMPTY] * num_slots) for layer in layers}
        self.generations = {layer: [0] * num_slots for layer in layers}

    def held_in(self, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The head in each slot of a layer, and the slots' generations."""
        return tuple(self.held[layer]), tuple(self.generations[layer])

    @property
    def block_size(self) -> int:
        return int(self.kv_pool.shape[3])

    @property
    def answer_size(self) -> int:
        """Floats of one row of one head."""
        return self.group_size * self.config.head_size

    def load(self, layer: int, head: int, slot: int) -> None:
        """Put a head into a slot, from the checkpoint. If this raises, the slot is empty."""
        self.clear(layer, slot)
        sources = self._weights.layout.head(layer, head)
        self._slots[layer].fill(slot, self._head_weights(sources))
        if layer not in self._rotations:
            norms = self._weights.load_optional(sources.q_norm), self._weights.load_optional(sources.k_norm)
            spec, mixer = self.config.layers[layer], self._mixer(layer)
            self._rotations[layer] = self._tables.rotation(mixer, *norms, spec.norm.eps, spec.norm.offset)
        self.pieces[layer][slot] = self.kv.piece_of(layer, head)
        self.held[layer][slot] = head
        self.generations[layer][slot] += 1

    def _mixer(self, layer: int) -> Gqa:
        mixer = self.config.layers[layer].mixer
        assert isinstance(mixer, Gqa), "only these have heads of their own"
        return mixer

    def _head_weights(self, sources: HeadSources) -> HeadWeights:
        loaded = self._weights.matrices(sources.qkv), map(self._weights.load, sources.qkv_bias)
        return HeadWeights(*loaded[0], *loaded[1])._replace(sinks_M=self._weights.load_optional(sources.sinks))

    def clear(self, layer: int, slot: int) -> None:
        """Empty a slot; one that is empty stays so, and keeps its generation. KV stays until its piece is needed."""
        head = self.held[layer][slot]
        if head == EMPTY:
            return
        self.held[layer][slot] = EMPTY
        self.kv.give_up(layer, head)
        self._slots[layer].clear(slot)
        self.generations[layer][slot] += 1

    def rows_at(self, layer: int, requests: int, num_requests: int) -> None:
        """Store and attend, in place: `requests` is the address of an array of `HeadRequest`, checked by the caller."""
        scores = scores_of(self._mixer(layer), None)
        self.ops.head_rows_at(
            requests, num_requests, self._slots[layer], self.kv_pool, self._rotations[layer], scores
        )  # fmt: skip
        for request in (HeadRequest * num_requests).from_address(requests):
            if request.chains:
                self.kv.sign(request.kv_slots, request.chains, request.num_rows, request.pieces, request.num_heads)
