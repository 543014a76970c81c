"""PlacedWeights: weights in places that were planned for them, on a device.

A place is found by the name of what lies there. If the places hold what they should already, nothing is read.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from everserve.backends.cuda.ops.ops import ArenaSlots
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.layout import Layout, Source, Weights
from everserve.model.ops import ExpertSlots, Ops
from everserve.plan.weights import PlannedTensor, WeightsPlan

_EXPERTS = ("experts",)  # filled slot by slot, not through here


class PlacedWeights(Weights):
    """`view(place)` is the tensor there. Everything is bfloat16."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        device: torch.device,
        plan: WeightsPlan,
        view: Callable[[PlannedTensor], Tensor],
        is_complete: bool,
    ) -> None:
        super().__init__(config, checkpoint, "bfloat16", device)
        self._place_of = {
            _names(_sources(self.layout, place)): place for place in plan.tensors if place.name not in _EXPERTS
        }
        self._view = view
        self._is_complete = is_complete

    def load(self, source: Source) -> Tensor:
        return self.merge((source,))

    def merge(self, sources: tuple[Source, ...]) -> Tensor:
        tensor = self._view(self._place_of[_names(sources)])
        if not self._is_complete:
            first = 0
            for source in sources:
                part = self.load_temporary(source)
                tensor[first : first + len(part)].copy_(part)
                first += len(part)
            assert first == len(tensor), f"{sources[0].name} is not what was planned here"
        return tensor

    def feed_forward(self, layer: int, ops: Ops) -> ExpertSlots:
        """Where it lies: a copy would be in device memory twice."""
        sources = self.layout.dense(layer)
        return ArenaSlots.of(self.merge((sources.gate, sources.up)), self.load(sources.down))


def _names(sources: tuple[Source, ...]) -> tuple[str, ...]:
    return tuple(source.name for source in sources)


def _sources(layout: Layout, place: PlannedTensor) -> tuple[Source, ...]:
    """What a plan calls by `name` (plan/weights.py), in the checkpoint's names."""
    name, layer = place.name, place.layer
    found: Source | tuple[Source, ...]
    if layer is None:
        found = getattr(layout, name)
    elif name == "router":
        found = layout.router(layer)
    elif name == "gate_up":
        dense = layout.dense(layer)
        found = (dense.gate, dense.up)
    elif name == "down":
        found = layout.dense(layer).down
    else:
        found = getattr(layout.attention(layer), name)
    return found if isinstance(found, tuple) else (found,)
