"""PlacedWeights: weights in places that were planned for them, on a device.

A place is found by the name of what lies there. If the places hold what they should already, nothing is read.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from everserve.backends.cuda.ops.ops import ArenaSlots
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.layout import Layout, Source
from everserve.model.ops import ExpertSlots, Ops
from everserve.model.spec import Dense
from everserve.model.weights import Weights
from everserve.plan.weights import PlannedTensor, WeightsPlan

_EXPERTS = ("experts",)  # filled slot by slot, not through here


class PlacedWeights(Weights):
    """`view(place)` is the tensor there. Everything is bfloat16, but for a few that are exact."""

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

    def feed_forward(self, layer: int, dense: Dense, ops: Ops) -> ExpertSlots:
        """Where it lies: a copy would be in device memory twice."""
        home = self.layout.home(layer)
        biases = self.merge(home["ffn_bias"]) if "ffn_bias" in home else None
        return ArenaSlots.of(self.merge(home["gate_up"]), self.merge(home["down"]), biases, dense.activation)


def _names(sources: tuple[Source, ...]) -> tuple[object, ...]:
    """Which tensors, and which rows of them: several weights may be parts of one."""
    return tuple((source.name, source.rows.start if source.rows is not None else None) for source in sources)


def _sources(layout: Layout, place: PlannedTensor) -> tuple[Source, ...]:
    """What a plan calls by `name` (plan/weights.py), in the checkpoint's names."""
    if place.layer is None:
        source: Source = getattr(layout, place.name)
        return (source,)
    return layout.home(place.layer)[place.name]
