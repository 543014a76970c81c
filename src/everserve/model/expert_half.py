"""ExpertHalf: the other side of the seam, a pure function of expert slots and rows.

It has no access to requests, KV or routes: rows come with the slot that is to compute them, and nothing is kept
between calls. Slots are filled and cleared while streams run, but never while rows are computed: `held` says which
expert is in which slot, and the code that gathers rows compares it with the expert that each row asks for.
"""

import ctypes
from collections.abc import Callable, Sequence

from torch import Tensor

from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.forms import ShardForm
from everserve.model.ops import ExpertOps, ExpertSlots, RowIndices, RowMemory, ShardWeights
from everserve.model.weights import Weights
from everserve.tables.slots import EMPTY, HeldSlots


class ExpertHalf:
    """The slots of all layers that cross the seam, empty at first. `num_slots`: of each of them. Where there is talk of
    experts, any shard of an FFN is meant (model/cut.py)."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: ExpertOps,
        num_slots: int | Sequence[int],
        dtype: str = "auto",
    ) -> None:
        self.config = config
        self._weights = Weights(config, checkpoint, dtype, ops.device, keeps_quantised=ops.device.type == "cpu")
        self._make_slots(ops, num_slots)

    def _make_slots(self, ops: ExpertOps, num_slots: int | Sequence[int]) -> None:
        layers = self.config.call_layers
        numbers = (num_slots,) * len(layers) if isinstance(num_slots, int) else num_slots
        self.ops = ops
        self.num_slots = max(numbers)
        self._slots = {
            layer: ops.expert_slots(num, self.config.activation(layer))
            for layer, num in zip(layers, numbers, strict=True)
        }
        # By layer, the expert in each slot, or EMPTY. Code outside Python reads it too, so it never moves; it does not
        # know which layers have fewer slots, and finds the others empty.
        self.held = {layer: (ctypes.c_int32 * self.num_slots)(*[EMPTY] * self.num_slots) for layer in layers}
        # By layer, how often each slot was changed. Written last.
        self.generations = {layer: [0] * slots.num_slots for layer, slots in self._slots.items()}

    def held_slots(self) -> HeldSlots:
        """What all slots hold now."""
        held = [self.held_in(layer) for layer in self._slots]
        return HeldSlots(experts=tuple(one for one, _ in held), generations=tuple(one for _, one in held))

    def held_in(self, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The expert in each slot of a layer, and the slots' generations."""
        return tuple(self.held[layer][: self._slots[layer].num_slots]), tuple(self.generations[layer])

    def load(self, layer: int, expert: int, slot: int) -> None:
        """Put an expert into a slot, from the checkpoint."""
        self.fill(layer, slot, expert, self.tensors(layer, expert))

    def tensors(self, layer: int, expert: int) -> ShardWeights:
        """The weights of an expert, from the checkpoint."""
        return self._weights.shard(self._weights.layout.shard(layer, expert))

    def form(self, layer: int, expert: int) -> ShardForm:
        """How these weights lie in memory, as one piece. Reads headers only."""
        return self._weights.shard_form(layer, expert)

    def fill(self, layer: int, slot: int, expert: int, weights: ShardWeights) -> None:
        """Put an expert into a slot, from wherever its weights came. If this raises, the slot is empty."""
        self.held[layer][slot] = EMPTY
        self._slots[layer].fill(slot, weights)
        self.held[layer][slot] = expert
        self.generations[layer][slot] += 1

    def load_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Every expert into the slot of its own number; `progress(done, total)` counts experts."""
        places = [(cut.layer, expert) for cut in self.config.cuts for expert in range(cut.num_shards)]
        for done, (layer, expert) in enumerate(places):
            self.load(layer, expert, slot=expert)
            if progress is not None:
                progress(done + 1, len(places))

    def clear(self, layer: int, slot: int) -> None:
        """Empty a slot; one that is empty stays so, and keeps its generation."""
        if self.held[layer][slot] == EMPTY:
            return
        self.held[layer][slot] = EMPTY
        self._slots[layer].clear(slot)
        self.generations[layer][slot] += 1

    def slots(self, layer: int) -> ExpertSlots:
        """The slots of one layer."""
        return self._slots[layer]

    def rows(self, layer: int, x_TD: Tensor, token_R: Tensor, slot_R: Tensor) -> Tensor:
        """y_RD: for each r, the expert in slot_R[r] applied to x_TD[token_R[r]]."""
        return self.ops.expert_rows(x_TD, token_R, slot_R, self._slots[layer])

    def rows_at(self, layer: int, memory: RowMemory, rows: RowIndices) -> None:
        """The same in place, on rows in memory that is shared with other processes."""
        self.ops.expert_rows_at(memory, rows, self._slots[layer])
