"""Whole layers in one call of C (csrc/ops/layers.c), because around small kernels Python takes as long as they do.

Where all experts are in this process, or are reached through lanes and none of these needs a decision, a step is one
call. Otherwise a call ends at a layer's seam, and the next one goes on behind it.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from everserve.backends.cpu.local_experts import LocalExperts
from everserve.backends.cpu.ops import (
    NO_NORM,
    NativeExpertSlots,
    NativeOps,
    choice_fields,
    matrix_facts,
    norm_fields,
    turn_fields,
    vector_facts,
    view_fields,
)
from everserve.backends.cpu.remote_experts import RemoteExperts, SeamInC
from everserve.model.batch import StepBatch
from everserve.model.masks import ExpertMasks
from everserve.model.ops import ExpertSlots
from everserve.model.quantised import Matrix
from everserve.model.whole_layers import LayerWeights, Register, Step, StepKind
from everserve.native.structs import source
from everserve.seam.experts import Experts

_c = source("ops", "layers.c")
_step, _layer, _slots = (_c.packer(struct) for struct in ("step", "layer", "slots"))
_EXPERTS_AT = _c.offset("layer", "experts")
_layers_args = _c.packer("layers_args").pack
_OUTCOME_AT = _c.constants["OUTCOME_AT"]

_NO_WEIGHT = (0, 0, 0, 0)
_NO_CHOICE = (0, 0, 0, 0, 1, 1, 2, 0, 0.0, 1.0)
_ELSEWHERE = (0, 0, 0)  # slots of a layer
_NO_SEAM = SeamInC(0, 0, 0)


class _Start(IntEnum):
    """enum start: where in its first layer a call begins."""

    AT_FIRST_STEP = 0
    WITH_ANSWERS = 1
    BEHIND_SEAM = 2


class _Buffers(NamedTuple):
    """What C needs for a step of so many rows. The last ones are kept: most steps have as many rows as that before."""

    num_rows: int
    normed_TD: Tensor
    residual_TD: Tensor
    answer_TD: Tensor
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
        self._hidden_size = first.output_DX.shape[0]
        self._q_width = first.output_DX.shape[1]
        self._shards = [_num_shards(layer) for layer in layers]
        self._most_shards = max(self._shards)
        self._needs_answers = any(step.into is Register.ANSWER for layer in layers for step in layer.steps)
        self._longest = min(_num_positions(layer) for layer in layers)
        self._table = ctypes.create_string_buffer(_layer.size * len(layers))
        self._table_ptr = ctypes.addressof(self._table)
        self._steps = [_packed_steps(layer) for layer in layers]  # kept alive
        for number, layer in enumerate(layers):
            _layer.pack_into(self._table, number * _layer.size, *_layer_fields(layer, self._steps[number]))
        self._seams = [next((s for s in layer.steps if s.kind is StepKind.SEAM), None) for layer in layers]
        self._allowed = (ctypes.c_void_p * len(layers))()
        self._experts: Experts | None = None  # those whose slots are in the table
        self._buffers: _Buffers | None = None

    def __call__(
        self, hidden_TD: Tensor, batch: StepBatch, kv_pool: Tensor, experts: Experts, masks: ExpertMasks
    ) -> Tensor:
        if experts is not self._experts:
            self._use(experts)
        pool, indices, counts = self._ops.batch_fields(batch, kv_pool, self._longest)
        buffers = self._buffers_for(len(hidden_TD), pool[3] * pool[5])
        fixed = (*pool, 0, 0, self._table_ptr, self._allowed_at(masks), *indices)
        at = [tensor.data_ptr() for tensor in buffers[1:]]
        sizes = (*counts, self._q_width // pool[5], self._hidden_size, self._most_shards)
        layer, start = 0, _Start.AT_FIRST_STEP
        while layer < self._num_layers:
            assert hidden_TD.shape == (buffers.num_rows, self._hidden_size)
            assert hidden_TD.dtype is torch.float32 and hidden_TD.is_contiguous()
            lanes = experts if isinstance(experts, RemoteExperts) else None
            seam = lanes.cross_in_c(buffers.num_rows, self._most_shards) if lanes is not None else _NO_SEAM
            found = self._ops.run_layers(
                _layers_args(*fixed, hidden_TD.data_ptr(), *at, *seam, *sizes, layer, self._num_layers, start)
            )
            if found < 0:
                raise LookupError(f"layer {-1 - found}: an expert is asked for whose slot is empty, or does not exist")
            outcome, layer = divmod(found, 1 << _OUTCOME_AT)
            if layer < self._num_layers and lanes is not None:
                lanes.heal(outcome, layer)
                start = _Start.WITH_ANSWERS
            elif layer < self._num_layers:
                hidden_TD = self._cross(layer, hidden_TD, buffers, experts)
                start = _Start.BEHIND_SEAM
        return hidden_TD

    def _cross(self, layer: int, hidden_TD: Tensor, buffers: _Buffers, experts: Experts) -> Tensor:
        """The seam of a layer whose experts are reached in another way. Returns where hidden is then."""
        num_rows, num_shards, step = buffers.num_rows, self._shards[layer], self._seams[layer]
        assert step is not None, f"layer {layer} has no seam"
        ids_TK, weights_TK = (
            flat[: num_rows * num_shards].view(num_rows, num_shards) for flat in (buffers.ids_TK, buffers.weights_TK)
        )
        rows = {
            Register.HIDDEN: hidden_TD,
            Register.NORMED: buffers.normed_TD,
            Register.RESIDUAL: buffers.residual_TD,
            Register.ANSWER: buffers.answer_TD,
        }
        residual_TD = rows.get(step.residual)
        if residual_TD is None:
            residual_TD = self._ops.nothing(hidden_TD)
        answer_TD = experts(layer, ids_TK, weights_TK, rows[step.x], residual_TD)
        if step.into is Register.HIDDEN:
            # What comes back is written to.
            return answer_TD if answer_TD is not residual_TD else answer_TD.clone()
        rows[step.into].copy_(answer_TD)
        return hidden_TD

    def _use(self, experts: Experts) -> None:
        """Say in the table which experts are here."""
        self._experts = None
        for number, layer in enumerate(self._layers):
            slots = experts.slots(number) if layer.crosses_seam and isinstance(experts, LocalExperts) else None
            _slots.pack_into(self._table, number * _layer.size + _EXPERTS_AT, *_slot_fields(slots))
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
            num_floats = 3 * self._q_width + 2 * kv_width + 1 + num_shards * (size + 3)  # struct scratch
            self._buffers = _Buffers(
                num_rows,
                torch.empty(num_rows, size),
                torch.empty(num_rows, size),
                torch.empty(num_rows if self._needs_answers else 0, size),
                torch.empty(num_rows * num_shards),
                torch.empty(num_rows * num_shards, dtype=torch.int32),
                torch.empty(num_rows * num_floats),
            )
        return self._buffers


def _num_shards(layer: LayerWeights) -> int:
    """The shards that each row goes to; 1 of an FFN at home."""
    if not layer.crosses_seam:
        return 1
    return layer.num_slices * (layer.router.top_k if layer.router is not None else 1)


def _num_positions(layer: LayerWeights) -> int:
    tables = layer.rotation.cos_PR, layer.rotation.q_scale_P
    return min((len(table) for table in tables if table is not None), default=1 << 31)


def _slot_fields(slots: ExpertSlots | None) -> tuple[int, int, int]:
    if not isinstance(slots, NativeExpertSlots):
        return _ELSEWHERE
    return slots.table_ptr, slots.num_slots, slots.inner_size


def _packed_steps(layer: LayerWeights) -> "ctypes.Array[ctypes.c_char]":
    packed = ctypes.create_string_buffer(_step.size * len(layer.steps))
    for number, step in enumerate(layer.steps):
        _step.pack_into(packed, number * _step.size, *_step_fields(layer, step))
    return packed


def _step_fields(layer: LayerWeights, step: Step) -> tuple[float, ...]:
    norms = (norm_fields(layer.norms[name], layer.norm) if name else NO_NORM for name in (step.norm, step.following))
    return step.kind, step.x, step.into, step.residual, step.normed, *(field for norm in norms for field in norm)


def _layer_fields(layer: LayerWeights, steps: "ctypes.Array[ctypes.c_char]") -> list[float]:
    rotation, router, router_weights = layer.rotation, layer.router, layer.router_weights
    attention = (
        _matrix(layer.qkv_XD), _vector(layer.qkv_bias_X), _vector(rotation.q_norm), _vector(rotation.k_norm),
        _matrix(layer.output_DX), _vector(layer.output_bias_D),
    )  # fmt: skip
    tables = (0 if table is None else table.data_ptr() for table in (rotation.cos_PR, rotation.sin_PR))
    choice: tuple[float, ...] = _NO_CHOICE
    if router is not None and router_weights is not None:
        choice = choice_fields(router, router_weights)
    return [
        ctypes.addressof(steps), len(layer.steps),
        *(field for weight in attention for field in weight),
        *tables, rotation.eps, layer.residual_scale, *turn_fields(rotation), *view_fields(layer.scores),
        *_matrix(router_weights.router_ND if router_weights is not None else None), *choice,
        router.top_k if router is not None else 1, router is not None and router.weighs_input,
        layer.num_slices if layer.crosses_seam else 1, layer.answer_scale,
        *_ELSEWHERE, *_slot_fields(layer.dense), *_matrix(layer.dense_gate_1D),
    ]  # fmt: skip


def _matrix(weight: Matrix | None) -> tuple[int, int, int, int]:
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
