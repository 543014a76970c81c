"""ExpertHalf: the other side of the seam, a pure function of expert slots and rows.

It has no access to requests, KV or routes: rows come with the slot that is to compute them, and nothing is kept
between calls. Slots are filled and cleared while streams run, but never while rows are computed: `held` says which
expert is in which slot, and the code that gathers rows compares it with the expert that each row asks for.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.layout import Weights
from everserve.model.ops import ExpertOps, RowIndices, RowMemory
from everserve.tables.slots import EMPTY


class ExpertHalf:
    """The expert slots of all MoE layers: `num_slots` per layer, empty at first."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, ops: ExpertOps, num_slots: int, dtype: str = "auto"
    ) -> None:
        self.config = config
        self._weights = Weights(config, checkpoint, dtype, ops.device)
        self._make_slots(ops, num_slots)

    def _make_slots(self, ops: ExpertOps, num_slots: int) -> None:
        self.ops = ops
        self.num_slots = num_slots
        self._slots = {layer: ops.expert_slots(num_slots) for layer in self.config.moe_layers}
        # By layer, the expert in each slot, or EMPTY. Code outside Python reads it too, so it never moves.
        self.held = {layer: (ctypes.c_int32 * num_slots)(*[EMPTY] * num_slots) for layer in self.config.moe_layers}
        # By layer, how often each slot was changed. Written last.
        self.generations = {layer: [0] * num_slots for layer in self.config.moe_layers}

    def load(self, layer: int, expert: int, slot: int) -> None:
        """Put an expert into a slot, from the checkpoint."""
        self.fill(layer, slot, expert, *self.tensors(layer, expert))

    def tensors(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate_FD, up_FD and down_DF of an expert, from the checkpoint."""
        sources = self._weights.layout.expert(layer, expert)
        gate_FD, up_FD = self._weights.load(sources.gate), self._weights.load(sources.up)
        return gate_FD, up_FD, self._weights.load(sources.down)

    def dtype(self, layer: int, expert: int) -> torch.dtype:
        """Of these tensors. Reads headers only."""
        return self._weights.dtype_of(self._weights.layout.expert(layer, expert).gate)

    def fill(self, layer: int, slot: int, expert: int, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        """Put an expert into a slot, from wherever its weights came. If this raises, the slot is empty."""
        self.held[layer][slot] = EMPTY
        self._slots[layer].fill(slot, gate_FD, up_FD, down_DF)
        self.held[layer][slot] = expert
        self.generations[layer][slot] += 1

    def load_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Every expert into the slot of its own number; `progress(done, total)` counts experts."""
        assert self.num_slots >= self.config.num_experts
        total = len(self._slots) * self.config.num_experts
        for index, layer in enumerate(self._slots):
            for expert in range(self.config.num_experts):
                self.load(layer, expert, slot=expert)
                if progress is not None:
                    progress(index * self.config.num_experts + expert + 1, total)

    def clear(self, layer: int, slot: int) -> None:
        """Empty a slot; one that is empty stays so, and keeps its generation."""
        if self.held[layer][slot] == EMPTY:
            return
        self.held[layer][slot] = EMPTY
        self._slots[layer].clear(slot)
        self.generations[layer][slot] += 1

    def rows(self, layer: int, x_TD: Tensor, token_R: Tensor, slot_R: Tensor) -> Tensor:
        """y_RD: for each r, the expert in slot_R[r] applied to x_TD[token_R[r]]."""
        return self.ops.expert_rows(x_TD, token_R, slot_R, self._slots[layer])

    def rows_at(self, layer: int, memory: RowMemory, rows: RowIndices) -> None:
        """The same in place, on rows in memory that is shared with other processes."""
        self.ops.expert_rows_at(memory, rows, self._slots[layer])
