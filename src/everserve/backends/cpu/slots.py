"""The slots of an expert worker on CPUs that reads experts where their file is mapped."""

import os
import time
from collections.abc import Callable, Sequence

from everserve.model.expert_half import ExpertHalf
from everserve.tables.ids import Rank
from everserve.tables.memory import Memory
from everserve.tables.slots import FailedFill, Fill, Filled, HeldSlots, Place, Source


class MappedSlots:
    """`check_source` raises if the files are not those that this instance serves. A fill touches hardly any weights, so
    it has ended when `begin` returns, and no other source can be cheaper."""

    def __init__(self, experts: ExpertHalf, check_source: Callable[[], None]) -> None:
        self._experts = experts
        self._layers = experts.config.call_layers
        self._check_source = check_source
        self._result: Filled | FailedFill | None = None

    def num_experts(self, layer_index: int) -> int:
        return self._experts.config.cuts[layer_index].num_shards

    @property
    def held(self) -> HeldSlots:
        return self._experts.held_slots()

    def begin(self, fill: Fill) -> None:
        layer, began_s = self._layers[fill.layer_index], time.monotonic()
        self._experts.clear(layer, fill.slot)
        try:
            self._check_source()
            self._experts.load(layer, fill.expert, fill.slot)
        except Exception as error:
            self._result = FailedFill(**fill._asdict(), reason=f"{type(error).__name__}: {error}")
        else:
            took_s = time.monotonic() - began_s
            self._result = Filled(fill=fill, source=Source.FILE, num_bytes=0, seconds=took_s)

    def poll(self) -> Filled | FailedFill | None:
        result, self._result = self._result, None
        return result

    def clear(self, place: Place) -> None:
        self._experts.clear(self._layers[place.layer_index], place.slot)

    def offer(self, rank: Rank | None, weights: Memory, fds: Sequence[int]) -> None:
        for fd in fds:
            os.close(fd)

    def withdraw(self, rank: Rank | None) -> None: ...
