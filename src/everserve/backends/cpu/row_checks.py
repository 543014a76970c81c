"""Rows that an expert worker says it has computed, and rows that it computes for such a check (wrong_rows.py)."""

import ctypes
import time
from collections.abc import Sequence

import numpy as np

from everserve.memory.tables import Memory
from everserve.model.expert_half import ExpertHalf
from everserve.model.ops import ExpertSlots, RowIndices, RowMemory
from everserve.tables.slots import EMPTY
from everserve.wire.messages import ComputeRow, RowComputed

_FLOAT_BYTES = 4
_BIT = 1 << 20  # of a float32's fraction: little enough to stay unnoticed, too much for rounding


class RowChecks:
    """`layers`: by index of the call, the layer; None where it is not about experts."""

    def __init__(self, experts: ExpertHalf, layers: Sequence[int | None], every_s: float) -> None:
        self.is_flipping = False  # an injected fault
        self.num_computed = 0  # of other workers
        self._experts = experts
        self._layers = layers
        self._every_s = every_s
        self._due_at = time.monotonic() + every_s
        self._hidden_size = experts.config.hidden_size
        self._own = Memory(2 * self._hidden_size * _FLOAT_BYTES)  # x, and what it is computed to
        self._indices = (ctypes.c_int32 * 3)(0, EMPTY, 1)
        self._memory = RowMemory(self._own.address, 2, self._hidden_size)
        self._sample: RowComputed | None = None

    @property
    def needs_batches(self) -> bool:
        """Whether `note` is to be called for the next batch."""
        return self.is_flipping or (self._every_s > 0 and time.monotonic() >= self._due_at)

    def note(self, call_index: int, memory: RowMemory, rows: RowIndices) -> None:
        """These rows were computed, and are not answered yet."""
        if self.is_flipping:
            self._flip(memory, rows)
        now = time.monotonic()
        layer = self._layers[call_index]
        if not self._every_s or now < self._due_at or layer is None:
            return
        self._due_at = now + self._every_s
        chosen = time.monotonic_ns() % rows.num_rows
        x, slot, y = (int(_numbers(address, rows.num_rows)[chosen]) for address in rows[:3])
        self._sample = RowComputed(
            call_index=call_index,
            expert=self._experts.held[layer][slot],
            x=bytes(self._row(memory, x)),
            y=bytes(self._row(memory, y)),
        )

    def next_sample(self) -> RowComputed | None:
        """What is to be said now."""
        sample, self._sample = self._sample, None
        return sample

    def compute(self, asked: ComputeRow) -> bytes:
        """The row's bits; none if there is no such row."""
        layer = self._layers[asked.call_index] if asked.call_index < len(self._layers) else None
        if layer is None or len(asked.x) != self._hidden_size * _FLOAT_BYTES:
            return b""
        self._row(self._memory, 0)[:] = np.frombuffer(asked.x, np.uint8)
        slots, slot = self._where(layer, asked.expert)
        self._indices[:] = [0, slot, 1]
        at = ctypes.addressof(self._indices)
        rows = RowIndices(at, at + _FLOAT_BYTES, at + 2 * _FLOAT_BYTES, 1)
        self._experts.ops.expert_rows_at(self._memory, rows, slots)
        if self.is_flipping:
            self._flip(self._memory, rows)
        self.num_computed += 1
        return bytes(self._row(self._memory, 1))

    def _where(self, layer: int, expert: int) -> tuple[ExpertSlots, int]:
        """The expert as it is held, or from the model's files."""
        held, _ = self._experts.held_in(layer)
        if expert in held:
            return self._experts.slots(layer), held.index(expert)
        own = self._experts.ops.expert_slots(1, self._experts.config.activation(layer))
        own.fill(0, self._experts.tensors(layer, expert))
        return own, 0

    def _row(self, memory: RowMemory, row: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        num_bytes = memory.hidden_size * _FLOAT_BYTES
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(memory.base + row * num_bytes))

    def _flip(self, memory: RowMemory, rows: RowIndices) -> None:
        for y in _numbers(rows.y_R, rows.num_rows):
            self._row(memory, int(y))[:4].view(np.uint32)[0] ^= _BIT


def _numbers(address: int, num: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.ctypeslib.as_array((ctypes.c_int32 * num).from_address(address))
