"""Where each weight of a seat lies in the device memory that outlives its workers.

    embedding, final norm, head | layer 0: norms, projections, router | layer 1 ... | experts or slices of all layers

Where heads are divided, an attention worker has not their weights (plan/head_memory.py).

The orchestrator allocates by this plan, and every incarnation of the seat reads and writes by it: it depends on its
inputs only. Everything is bfloat16, but for a few small weights that must not be narrowed. The experts are one tensor,
[layer, slot] by [gate, up, down, biases]: an expert is one piece of memory, which is copied and checked as a whole, and
kernels address all of them from one beginning.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from everserve.errors import ConfigError
from everserve.tables.calls import FfnCut
from everserve.tables.ids import Role

ALIGNMENT = 256  # bytes; every tensor begins at a multiple: more than any kernel requires
PAGE_BYTES = 2 << 20  # granularity of device memory
ITEM_BYTES, EXACT_BYTES = 2, 4
_MATRICES = 3  # of an expert: gate and up [F, D], down [D, F]
_BOX_ROWS = 128  # a multiple of what any kernel reads at once


class ModelSizes(Protocol):
    """What a plan must know of a model; `ModelConfig` is one."""

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
    def num_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def moe_layers(self) -> tuple[int, ...]: ...
    @property
    def outer_weights(self) -> Mapping[str, tuple[int, ...]]: ...
    def home_weights(self, layer: int) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def exact_weights(self) -> frozenset[str]: ...
    @property
    def weights_per_token(self) -> int: ...
    @property
    def values_per_key(self) -> int: ...
    @property
    def has_plain_heads(self) -> bool: ...
    @property
    def has_heads_of_their_own(self) -> bool: ...
    @property
    def has_latent_attention(self) -> bool: ...
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
    is_exact: bool = False  # float32

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * (EXACT_BYTES if self.is_exact else ITEM_BYTES)


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
            tensor = PlannedTensor(*weight, offset=_up(end, ALIGNMENT), is_exact=weight[0] in model.exact_weights)
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
    for name, shape in model.outer_weights.items():
        yield name, None, shape


def _attention_half(model: ModelSizes, layer: int) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    for name, shape in model.home_weights(layer).items():
        yield name, layer, shape


def _experts(model: ModelSizes, num_slots: int) -> Iterator[tuple[str, None, tuple[int, ...]]]:
    num, size, hidden = len(model.cuts) * num_slots, _shard_size(model), model.hidden_size
    numbers = model.cuts[0].num_weights(hidden)
    is_plain = numbers == _MATRICES * size * hidden
    yield "experts", None, (num, _MATRICES, size, hidden) if is_plain else (num, numbers)


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
