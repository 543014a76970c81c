"""The slots of an expert worker on CPUs that reads experts, and heads, where their file is mapped."""

import os
import time
from collections.abc import Callable, Sequence

from everserve.model.expert_half import ExpertHalf
from everserve.model.head_half import HeadHalf
from everserve.tables.calls import ShardKind
from everserve.tables.ids import Rank
from everserve.tables.memory import MemoryName
from everserve.tables.slots import FailedFill, Fill, Filled, HeldSlots, Place, Source


class MappedSlots:
    """`check_source` raises if the files are not those that this instance serves. A fill touches hardly any weights, so
    it has ended when `begin` returns, and no other source can be cheaper."""

    def __init__(self, experts: ExpertHalf, check_source: Callable[[], None], heads: HeadHalf | None = None) -> None:
        config = experts.config
        self._calls = [cut.call for cut in config.cuts] if heads is None else config.calls
        self._experts = experts
        self._heads = heads
        self._check_source = check_source
        self._result: Filled | FailedFill | None = None

    def num_experts(self, call_index: int) -> int:
        return self._calls[call_index].num_shards

    @property
    def held(self) -> HeldSlots:
        held = [half.held_in(layer) for half, layer in map(self._at, range(len(self._calls)))]
        return HeldSlots(experts=tuple(one for one, _ in held), generations=tuple(one for _, one in held))

    def _at(self, index: int) -> tuple[ExpertHalf | HeadHalf, int]:
        """What has the slots of this call, and the layer."""
        call = self._calls[index]
        if call.kind is ShardKind.HEAD:
            assert self._heads is not None
            return self._heads, call.layer
        return self._experts, call.layer

    def begin(self, fill: Fill) -> None:
        (half, layer), began_s = self._at(fill.call_index), time.monotonic()
        half.clear(layer, fill.slot)
        try:
            self._check_source()
            half.load(layer, fill.expert, fill.slot)
        except Exception as error:
            self._result = FailedFill(**fill._asdict(), reason=f"{type(error).__name__}: {error}")
        else:
            took_s = time.monotonic() - began_s
            self._result = Filled(fill=fill, source=Source.FILE, num_bytes=0, seconds=took_s)

    def poll(self) -> Filled | FailedFill | None:
        result, self._result = self._result, None
        return result

    def clear(self, place: Place) -> None:
        half, layer = self._at(place.call_index)
        half.clear(layer, place.slot)

    def offer(self, rank: Rank | None, weights: MemoryName, fds: Sequence[int]) -> None:
        for fd in fds:
            os.close(fd)

    def withdraw(self, rank: Rank | None) -> None: ...

    def tend(self) -> None: ...
