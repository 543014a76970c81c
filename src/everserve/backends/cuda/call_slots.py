"""CallSlots: all slots of an expert worker on a GPU where heads are divided.

Orchestrators, and the words of lanes, know calls: heads, then the FFN, layer by layer. The slots of FFNs are as without
divided heads (memory/weights/slots.py), numbered by FFN; those of heads are here.

A head that is filled while streams run is a rare thing (a device is lost, or has returned), and every stream waits for
it, or is computed again: so graphs are let run out, and it is loaded at once.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from everserve.model.config import ModelConfig
from everserve.plan.head_memory import Head
from everserve.tables.calls import ShardKind
from everserve.tables.ids import Rank
from everserve.tables.memory import MemoryName
from everserve.tables.slots import EMPTY, FailedFill, Fill, Filled, HeldSlots, Place, Source
from everserve.worker.slot_changes import ChangeableSlots


class HeadKernels(Protocol):
    """What is needed of `CudaServer`."""

    def empty(self, call_index: int, slot: int) -> None: ...
    def drain(self) -> None: ...
    def hold_head(self, call: int, slot: int, head: int, piece: int, pool: int) -> None: ...


class Pieces(Protocol):
    """What is needed of `HeadMemory`."""

    @property
    def pool(self) -> int: ...
    def load(self, head: Head) -> int: ...
    def give_up(self, head: Head) -> None: ...


class FfnKernels:
    """`SlotKernels` (device_places.py) of the FFNs: a server that knows calls, for slots that know FFNs."""

    def __init__(self, server: "ServedSlots", call_of_ffn: Sequence[int]) -> None:
        self._server = server
        self._call_of_ffn = tuple(call_of_ffn)

    def empty(self, call_index: int, slot: int) -> None:
        self._server.empty(self._call_of_ffn[call_index], slot)

    def hold(self, call_index: int, slot: int, expert: int, place: int) -> None:
        self._server.hold(self._call_of_ffn[call_index], slot, expert, place)

    def fence(self) -> Callable[[], bool]:
        return self._server.fence()

    def ring(self) -> None:
        self._server.ring()

    def drain(self) -> None:
        self._server.drain()


class ServedSlots(Protocol):
    """What is needed of `CudaServer` for FFNs."""

    def empty(self, call_index: int, slot: int) -> None: ...
    def fence(self) -> Callable[[], bool]: ...
    def ring(self) -> None: ...
    def hold(self, call_index: int, slot: int, expert: int, place: int) -> None: ...
    def drain(self) -> None: ...


class CallSlots:
    """`ChangeableSlots`, by call. `held`: by call about heads, what each slot has at first."""

    def __init__(
        self,
        model: ModelConfig,
        ffn: ChangeableSlots,
        held: dict[int, Sequence[int]],
        server: HeadKernels,
        pieces: Pieces,
    ) -> None:
        self._calls = model.calls
        self._ffn = ffn
        ffn_calls = [i for i, call in enumerate(model.calls) if call.kind is not ShardKind.HEAD]
        self._index_of = {call: index for index, call in enumerate(ffn_calls)}
        self._heads = {call: [*heads] for call, heads in held.items()}
        self._generations = {call: [int(head != EMPTY) for head in heads] for call, heads in held.items()}
        self._server = server
        self._pieces = pieces
        self._result: Filled | FailedFill | None = None
        self._fill: Fill | None = None  # of an FFN, as it was asked for

    def num_experts(self, call_index: int) -> int:
        return self._calls[call_index].num_shards

    @property
    def held(self) -> HeldSlots:
        ffn = self._ffn.held
        held = [self._held_in(call, ffn) for call in range(len(self._calls))]
        return HeldSlots(experts=tuple(one for one, _ in held), generations=tuple(one for _, one in held))

    def _held_in(self, call: int, ffn: HeldSlots) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if call in self._heads:
            return tuple(self._heads[call]), tuple(self._generations[call])
        index = self._index_of[call]
        return ffn.experts[index], ffn.generations[index]

    def begin(self, fill: Fill) -> None:
        if fill.call_index not in self._heads:
            self._fill = fill
            self._ffn.begin(fill._replace(call_index=self._index_of[fill.call_index]))
            return
        began_s = time.monotonic()
        self.clear(Place(fill.call_index, fill.slot))
        self._server.drain()
        try:
            piece = self._pieces.load((self._calls[fill.call_index].layer, fill.expert))
        except Exception as error:
            self._result = FailedFill(**fill._asdict(), reason=f"{type(error).__name__}: {error}")
            return
        self._server.hold_head(fill.call_index, fill.slot, fill.expert, piece, self._pieces.pool)
        self._heads[fill.call_index][fill.slot] = fill.expert
        self._generations[fill.call_index][fill.slot] += 1
        took_s = time.monotonic() - began_s
        self._result = Filled(fill=fill, source=Source.FILE, num_bytes=0, seconds=took_s)

    def poll(self) -> Filled | FailedFill | None:
        result, self._result = self._result, None
        if result is not None or self._fill is None:
            return result
        found = self._ffn.poll()
        if found is None:
            return None
        asked, self._fill = self._fill, None
        if isinstance(found, FailedFill):
            return FailedFill(**asked._asdict(), reason=found.reason)
        return Filled(fill=asked, source=found.source, num_bytes=found.num_bytes, seconds=found.seconds)

    def clear(self, place: Place) -> None:
        call, slot = place
        if call not in self._heads:
            self._ffn.clear(Place(self._index_of[call], slot))
            return
        head = self._heads[call][slot]
        if head != EMPTY:
            self._heads[call][slot] = EMPTY
            self._generations[call][slot] += 1
            self._server.empty(call, slot)
            self._pieces.give_up((self._calls[call].layer, head))

    def offer(self, rank: Rank | None, weights: MemoryName, fds: Sequence[int]) -> None:
        self._ffn.offer(rank, weights, fds)

    def withdraw(self, rank: Rank | None) -> None:
        self._ffn.withdraw(rank)

    def tend(self) -> None:
        self._ffn.tend()
