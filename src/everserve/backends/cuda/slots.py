"""The slots of an expert worker on a GPU, as its orchestrator changes them.

    fill     let all graphs end -> the slot is empty -> load and copy -> the slot holds it

Nothing is queued meanwhile: a graph that waits for its bell would hold up whatever needs the whole device, and loading
may. What kernels compare requests with (`held_LS`) is written on the stream that has written the weights, after them.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from everserve.backends.cuda.ops.experts import ExpertArena
from everserve.tables.slots import EMPTY, Fill, HeldSlots, Place


class _Weights(Protocol):
    """What is needed of `SeatWeights`."""

    @property
    def experts(self) -> Sequence[Sequence[int]]: ...
    def load_checked(self, layer_index: int, expert: int) -> tuple[Tensor, Tensor, Tensor]: ...
    def begin_change(self, layer_index: int, slot: int, expert: int) -> None: ...
    def complete(self) -> None: ...


class _Server(Protocol):
    """What is needed of `CudaServer`."""

    def empty(self, layer_index: int, slot: int) -> None: ...
    def hold(self, layer_index: int, slot: int, expert: int) -> None: ...


class CudaSlots:
    """`weights` records what is in the seat's memory for the next incarnation, `server` what may be computed now."""

    def __init__(self, weights: _Weights, arena: ExpertArena, server: _Server, num_experts: int) -> None:
        self.num_experts = num_experts
        self._weights = weights
        self._arena = arena
        self._server = server
        self._generations = [[int(expert != EMPTY) for expert in experts] for experts in weights.experts]

    @property
    def held(self) -> HeldSlots:
        return HeldSlots(
            experts=tuple(map(tuple, self._weights.experts)), generations=tuple(map(tuple, self._generations))
        )

    def fill(self, fill: Fill) -> None:
        index, slot, expert = fill
        self._generations[index][slot] += self._weights.experts[index][slot] != EMPTY
        self._weights.begin_change(index, slot, expert)
        self._server.empty(index, slot)
        try:
            self._arena.fill(index, slot, *self._weights.load_checked(index, expert))
        except BaseException:
            self._weights.begin_change(index, slot, EMPTY)
            self._weights.complete()
            raise
        self._server.hold(index, slot, expert)
        self._generations[index][slot] += 1
        self._weights.complete()

    def clear(self, place: Place) -> None:
        index, slot = place
        if self._weights.experts[index][slot] == EMPTY:
            return
        self._weights.begin_change(index, slot, EMPTY)
        self._server.empty(index, slot)
        self._generations[index][slot] += 1
        self._weights.complete()
