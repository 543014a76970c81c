"""Where each weight of a seat lies in the device memory that outlives its workers.

    embedding, final norm, head | layer 0: norms, projections, router | layer 1 ... | experts or slices of all layers

Where heads are divided, an attention worker has not their weights (plan/head_memory.py).

The orchestrator allocates by this plan, and every incarnation of the seat reads and writes by it: it depends on its
inputs only. Everything is bfloat16. The experts are one tensor, [layer, slot] by [gate, up, down]: an expert is one
piece of memory, which is copied and checked as a whole, and kernels address all of them from one beginning.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from everserve.errors import ConfigError
from everserve.tables.calls import FfnCut
from everserve.tables.ids import Role

ALIGNMENT = 256  # bytes; every tensor begins at a multiple: more than any kernel requires
PAGE_BYTES = 2 << 20  # granularity of device memory
ITEM_BYTES = 2
_BOX_ROWS = 128  # a multiple of what any kernel reads at once
MATRICES_PER_EXPERT = 3  # gate and up [F, D], down [D, F]


class ModelSizes(Protocol):
    """What a plan must know of a model; `ModelConfig` is one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def expert_intermediate_size(self) -> int: ...
    @property
    def moe_layers(self) -> tuple[int, ...]: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def cuts(self) -> tuple[FfnCut, ...]: ...
    @property
    def divides_heads(self) -> bool: ...


@dataclass(frozen=True)
class PlannedTensor:
    """One weight and its place, in bytes from the beginning of the memory."""

    name: str
    layer: int | None  # None: not of a single layer
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES


@dataclass(frozen=True)
class WeightsPlan:
    """All weights of one seat, in memory order."""

    tensors: tuple[PlannedTensor, ...]
    num_bytes: int  # of the memory: whole pages, at least one

    @classmethod
    def of(cls, model: ModelSizes, roles: Sequence[Role], num_slots: int) -> "WeightsPlan":
        """`num_slots`: expert slots per layer; 0 for a seat without the expert role."""
        weights: list[tuple[str, int | None, tuple[int, ...]]] = []
        overhang = 0
        if Role.ATTENTION in roles:
            weights += _around_layers(model)
            for layer in range(model.num_layers):
                weights += _attention_half(model, layer)
        if Role.EXPERT in roles and num_slots:
            weights += _experts(model, num_slots)
            overhang = _overhang(model)
        tensors: list[PlannedTensor] = []
        end = 0
        for weight in weights:
            tensor = PlannedTensor(*weight, offset=_up(end, ALIGNMENT))
            tensors.append(tensor)
            end = tensor.offset + tensor.num_bytes
        return cls(tuple(tensors), _up(max(end + overhang, 1), PAGE_BYTES))

    def tensor(self, name: str, layer: int | None = None) -> PlannedTensor:
        """KeyError if this seat has no such weight."""
        return self._by_name[name, layer]

    def offset(self, name: str, layer: int | None = None) -> int:
        return self.tensor(name, layer).offset

    def has(self, name: str, layer: int | None = None) -> bool:
        return (name, layer) in self._by_name

    @cached_property
    def _by_name(self) -> dict[tuple[str, int | None], PlannedTensor]:
        return {(tensor.name, tensor.layer): tensor for tensor in self.tensors}


def _around_layers(model: ModelSizes) -> Iterator[tuple[str, None, tuple[int, ...]]]:
    yield "embedding", None, (model.vocab_size, model.hidden_size)
    yield "final_norm", None, (model.hidden_size,)
    if not model.tie_word_embeddings:
        yield "lm_head", None, (model.vocab_size, model.hidden_size)


def _attention_half(model: ModelSizes, layer: int) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    crosses_seam = any(cut.layer == layer for cut in model.cuts)
    for name, shape in _one_layer(model, layer in model.moe_layers, crosses_seam):
        yield name, layer, shape


def _one_layer(model: ModelSizes, is_moe: bool, crosses_seam: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """With the names of model/attention_half.py. `gate_up`, `down`: an FFN that does not cross the seam."""
    hidden, head = model.hidden_size, model.head_size
    q_size, qkv_size = model.num_heads * head, (model.num_heads + 2 * model.num_kv_heads) * head
    yield "input_norm", (hidden,)
    if not model.divides_heads:
        yield "qkv", (qkv_size, hidden)
        if model.attention_bias:
            yield "qkv_bias", (qkv_size,)
        if model.qk_norm:
            yield "q_norm", (head,)
            yield "k_norm", (head,)
    yield "output", (hidden, q_size)
    if model.attention_bias:
        yield "output_bias", (hidden,)
    yield "post_norm", (hidden,)
    if is_moe:
        yield "router", (model.num_experts, hidden)
    if not crosses_seam:
        yield "gate_up", (2 * model.intermediate_size, hidden)
        yield "down", (hidden, model.intermediate_size)


def _experts(model: ModelSizes, num_slots: int) -> Iterator[tuple[str, None, tuple[int, ...]]]:
    yield "experts", None, (len(model.cuts) * num_slots, MATRICES_PER_EXPERT, _shard_size(model), model.hidden_size)


def _overhang(model: ModelSizes) -> int:
    """How far kernels read beyond the last expert. They read boxes of rows, ignore what is not the expert's, and rely
    on memory being there: where kernels of other seats read this memory, nothing else may follow it."""
    hidden, size = model.hidden_size, _shard_size(model)
    beyond_up = (_up(size, _BOX_ROWS) - 2 * size) * hidden  # `down` follows
    beyond_down = (_up(hidden, _BOX_ROWS) - hidden) * size
    return max(beyond_up, beyond_down, 0) * ITEM_BYTES


def _shard_size(model: ModelSizes) -> int:
    """All shards are in one tensor."""
    sizes = {cut.shard_size for cut in model.cuts}
    if len(sizes) > 1:
        raise ConfigError("tensor parallelism of a model with experts and dense layers: only on CPUs")
    return sizes.pop()


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
