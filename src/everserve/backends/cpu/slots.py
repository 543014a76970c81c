"""The slots of an expert worker on CPUs, as its orchestrator changes them."""

from collections.abc import Callable

from everserve.model.expert_half import ExpertHalf
from everserve.tables.slots import Fill, HeldSlots, Place


class CpuSlots:
    """`check_source` raises if the files are not those that this instance serves. Weights are read where they are
    mapped, so a fill touches hardly any of them."""

    def __init__(self, experts: ExpertHalf, check_source: Callable[[], None]) -> None:
        self._experts = experts
        self._layers = experts.config.moe_layers
        self._check_source = check_source

    @property
    def num_experts(self) -> int:
        return self._experts.config.num_experts

    @property
    def held(self) -> HeldSlots:
        return HeldSlots(
            experts=tuple(tuple(self._experts.held[layer]) for layer in self._layers),
            generations=tuple(tuple(self._experts.generations[layer]) for layer in self._layers),
        )

    def fill(self, fill: Fill) -> None:
        layer = self._layers[fill.layer_index]
        self._experts.clear(layer, fill.slot)
        self._check_source()
        self._experts.load(layer, fill.expert, fill.slot)

    def clear(self, place: Place) -> None:
        self._experts.clear(self._layers[place.layer_index], place.slot)
