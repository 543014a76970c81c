"""PlacedWeights: weights in places that were planned for them, on a device.

The places are given in the order in which a Decoder asks for its weights. If they hold what they should already,
nothing is read.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.layout import Source, Weights
from everserve.plan.weights import PlannedTensor

_NOT_ASKED_FOR = ("gate_up", "down", "expert_gate_up", "expert_down")  # those are filled slot by slot


class PlacedWeights(Weights):
    """`view(place)` is the tensor there. Everything is bfloat16."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        device: torch.device,
        places: Iterable[PlannedTensor],
        view: Callable[[PlannedTensor], Tensor],
        is_complete: bool,
    ) -> None:
        super().__init__(config, checkpoint, "bfloat16", device)
        self._places = iter([place for place in places if place.name not in _NOT_ASKED_FOR])
        self._view = view
        self._is_complete = is_complete

    def load(self, source: Source) -> Tensor:
        return self.merge((source,))

    def merge(self, sources: tuple[Source, ...]) -> Tensor:
        tensor = self._view(next(self._places))
        if not self._is_complete:
            first = 0
            for source in sources:
                part = self.load_temporary(source)
                tensor[first : first + len(part)].copy_(part)
                first += len(part)
            assert first == len(tensor), f"{sources[0].name} is not what was planned here"
        return tensor
