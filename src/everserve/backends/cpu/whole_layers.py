"""Whole layers in one call of C (csrc/ops/layers.c), because around small kernels Python takes as long as they do.

Where all experts are in this process, or are reached through lanes and none of these needs a decision, a step is one
call. Otherwise a call ends at a layer's seam, and the next one goes on behind it.
"""

import ctypes
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from everserve.backends.cpu.local_experts import LocalExperts
from everserve.backends.cpu.ops import NativeExpertSlots, NativeOps, matrix_facts, vector_facts
from everserve.backends.cpu.remote_experts import RemoteExperts, SeamInC
from everserve.model.batch import StepBatch
from everserve.model.masks import ExpertMasks
from everserve.model.ops import ExpertSlots
from everserve.model.whole_layers import LayerWeights
from everserve.seam.experts import Experts

_weight_format = "P3q"
_layer = Struct(9 * _weight_format + "P5q")  # struct layer in csrc/ops/layers.c
_slots = Struct("P2q")
_SLOTS_AT = Struct(9 * _weight_format).size  # in struct layer
_layers_args = Struct("P6q18P9q2d").pack
_OUTCOME_AT = 32

_NO_WEIGHT = (0, 0, 0, 0)
_ELSEWHERE = (0, 0, 0)  # slots of a layer
_NO_SEAM = SeamInC(0, 0, 0)


class _Buffers(NamedTuple):
    """What C needs for a step of so many rows. The last ones are kept: most steps have as many rows as that before."""

    num_rows: int
    residual_TD: Tensor
    normed_TD: Tensor
    weights_TK: Tensor  # K: of the layer that asks the most shards
    ids_TK: Tensor
    scratch: Tensor


class NativeWholeLayers:
    """`WholeLayers` of these ops. Weights must not get another dtype, shape or address afterwards."""

    def __init__(self, ops: NativeOps, layers: Sequence[LayerWeights]) -> None:
        self._ops = ops
        self._layers = layers  # kept alive
        self._num_layers = len(layers)
        first = layers[0]
        self._hidden_size = first.input_norm_D.shape[0]
        self._shards = [layer.top_k * layer.num_slices for layer in layers]
        self._most_shards = max(self._shards)
        self._num_q_heads = first.output_DX.shape[1] // first.rotation.cos_PE.shape[1]
        self._rotation, self._eps, self._scale = first.rotation, first.eps, first.scale
        self._rotation_at = first.rotation.cos_PE.data_ptr(), first.rotation.sin_PE.data_ptr()
        assert all(layer.eps == layer.rotation.eps == self._eps and layer.scale == self._scale for layer in layers)
        assert all(layer.rotation.cos_PE is first.rotation.cos_PE for layer in layers), "one table of positions"
        self._table = ctypes.create_string_buffer(_layer.size * len(layers))
        self._table_ptr = ctypes.addressof(self._table)
        for number, layer in enumerate(layers):
            _layer.pack_into(self._table, number * _layer.size, *_layer_fields(layer))
        self._allowed = (ctypes.c_void_p * len(layers))()
        self._experts: Experts | None = None  # those whose slots are in the table
        self._buffers: _Buffers | None = None

    def __call__(
        self, hidden_TD: Tensor, batch: StepBatch, kv_pool: Tensor, experts: Experts, masks: ExpertMasks
    ) -> Tensor:
        if experts is not self._experts:
            self._use(experts)
        pool, indices, counts = self._ops.batch_fields(batch, kv_pool, self._rotation)
        buffers = self._buffers_for(len(hidden_TD), pool[3] * pool[5])
        fixed = (*pool, 0, 0, self._table_ptr, self._allowed_at(masks), *self._rotation_at, *indices)
        at = [tensor.data_ptr() for tensor in buffers[1:]]
        sizes = (*counts, self._num_q_heads, self._hidden_size, self._most_shards)
        layer, is_behind_seam = 0, False
        while layer < self._num_layers:
            assert hidden_TD.shape == (buffers.num_rows, self._hidden_size)
            assert hidden_TD.dtype is torch.float32 and hidden_TD.is_contiguous()
            lanes = experts if isinstance(experts, RemoteExperts) else None
            seam = lanes.cross_in_c(buffers.num_rows, self._most_shards) if lanes is not None else _NO_SEAM
            found = self._ops.run_layers(
                _layers_args(
                    *fixed, hidden_TD.data_ptr(), *at, *seam,
                    *sizes, layer, self._num_layers, is_behind_seam, self._eps, self._scale,
                )
            )  # fmt: skip
            if found < 0:
                raise LookupError(f"layer {-1 - found}: an expert is asked for whose slot is empty, or does not exist")
            outcome, layer = divmod(found, 1 << _OUTCOME_AT)
            if layer < self._num_layers and lanes is not None:
                lanes.heal(outcome, layer)
                is_behind_seam = True
            elif layer < self._num_layers:
                hidden_TD = self._cross(layer, buffers, experts)
                layer += 1
        return hidden_TD

    def _cross(self, layer: int, buffers: _Buffers, experts: Experts) -> Tensor:
        """The rest of a layer whose experts are reached in another way."""
        num_rows, num_shards = buffers.num_rows, self._shards[layer]
        ids_TK, weights_TK = (
            flat[: num_rows * num_shards].view(num_rows, num_shards) for flat in (buffers.ids_TK, buffers.weights_TK)
        )
        hidden_TD = experts(layer, ids_TK, weights_TK, buffers.normed_TD, buffers.residual_TD)
        return hidden_TD if hidden_TD is not buffers.residual_TD else hidden_TD.clone()  # that is written to

    def _use(self, experts: Experts) -> None:
        """Say in the table which experts are here."""
        self._experts = None
        for number, layer in enumerate(self._layers):
            slots = layer.dense
            if slots is None and isinstance(experts, LocalExperts):
                slots = experts.slots(number)
            _slots.pack_into(self._table, number * _layer.size + _SLOTS_AT, *_slot_fields(slots))
        self._experts = experts

    def _allowed_at(self, masks: ExpertMasks) -> int:
        if not masks.is_any:
            return 0
        for number in range(self._num_layers):
            allowed_N = masks.allowed(number)
            self._allowed[number] = allowed_N.data_ptr() if allowed_N is not None else None
        return ctypes.addressof(self._allowed)

    def _buffers_for(self, num_rows: int, kv_width: int) -> _Buffers:
        if self._buffers is None or self._buffers.num_rows != num_rows:
            self._buffers = None  # before new ones are made: those of a long prompt are large
            size, num_shards = self._hidden_size, self._most_shards
            q_width = self._layers[0].output_DX.shape[1]
            num_floats = 3 * q_width + 2 * kv_width + num_shards * (size + 3)  # struct scratch
            self._buffers = _Buffers(
                num_rows,
                torch.empty(num_rows, size),
                torch.empty(num_rows, size),
                torch.empty(num_rows * num_shards),
                torch.empty(num_rows * num_shards, dtype=torch.int32),
                torch.empty(num_rows * num_floats),
            )
        return self._buffers


def _slot_fields(slots: ExpertSlots | None) -> tuple[int, int, int]:
    if not isinstance(slots, NativeExpertSlots):
        return _ELSEWHERE
    return slots.table_ptr, slots.num_slots, slots.inner_size


def _layer_fields(layer: LayerWeights) -> list[int]:
    rotation = layer.rotation
    weights = (
        _vector(layer.input_norm_D), _matrix(layer.qkv_XD), _vector(layer.qkv_bias_X), _vector(rotation.q_norm_E),
        _vector(rotation.k_norm_E), _matrix(layer.output_DX), _vector(layer.output_bias_D), _vector(layer.post_norm_D),
        _matrix(layer.router_ND),
    )  # fmt: skip
    return [*(field for weight in weights for field in weight), *_ELSEWHERE,
            layer.top_k, layer.renormalise, layer.num_slices]  # fmt: skip


def _matrix(weight: Tensor | None) -> tuple[int, int, int, int]:
    """struct weight."""
    if weight is None:
        return _NO_WEIGHT
    num_rows, _, stride, dtype = matrix_facts(weight)
    return weight.data_ptr(), num_rows, stride, dtype


def _vector(weight: Tensor | None) -> tuple[int, int, int, int]:
    if weight is None:
        return _NO_WEIGHT
    size, dtype = vector_facts(weight)
    return weight.data_ptr(), size, 1, dtype
