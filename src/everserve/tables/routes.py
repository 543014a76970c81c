"""Routes: logical expert -> ordered candidates (rank, slot), per layer, at one epoch."""

from enum import StrEnum

import msgspec
import numpy as np

from everserve.tables.ids import Epoch, Rank, SlotId

_DTYPE = np.dtype("<i2")
NO_RANK = -1


class Routes(msgspec.Struct, frozen=True, kw_only=True):
    """The table, packed: it is read by index in every layer and sent on every change.

    `table` is int16 [layer index][expert][candidate][rank, slot]; where there are fewer candidates than
    `num_candidates`, the last ones are (-1, -1).
    """

    epoch: Epoch
    num_layers: int
    num_experts: int
    num_candidates: int
    table: bytes

    def __post_init__(self) -> None:
        expected = self.num_layers * self.num_experts * self.num_candidates * 2 * _DTYPE.itemsize
        if len(self.table) != expected:
            raise ValueError(f"a routes table of {len(self.table)} bytes where {expected} are expected")

    @classmethod
    def of(cls, epoch: Epoch, candidates: list[list[list[tuple[Rank, SlotId]]]]) -> "Routes":
        """From nested lists [layer index][expert] -> candidates in order."""
        num_layers, num_experts = len(candidates), len(candidates[0]) if candidates else 0
        width = max((len(one) for layer in candidates for one in layer), default=0)
        table = np.full((num_layers, num_experts, width, 2), NO_RANK, _DTYPE)
        for i, layer in enumerate(candidates):
            for expert, places in enumerate(layer):
                for k, place in enumerate(places):
                    table[i, expert, k] = place
        return cls(
            epoch=epoch,
            num_layers=num_layers,
            num_experts=num_experts,
            num_candidates=width,
            table=table.tobytes(),
        )

    def array(self) -> "np.ndarray[tuple[int, int, int, int], np.dtype[np.int16]]":
        """[layer index][expert][candidate][rank, slot], read-only."""
        shape = (self.num_layers, self.num_experts, self.num_candidates, 2)
        return np.frombuffer(self.table, _DTYPE).reshape(shape)

    @property
    def num_without_place(self) -> int:
        """Experts that no worker can compute now, over all layers."""
        if self.num_candidates == 0:
            return self.num_layers * self.num_experts
        return int((self.array()[:, :, 0, 0] == NO_RANK).sum())

    def candidates(self, layer_index: int, expert: int) -> tuple[tuple[Rank, SlotId], ...]:
        places = self.array()[layer_index, expert].tolist()
        return tuple((Rank(rank), SlotId(slot)) for rank, slot in places if rank != NO_RANK)


class Symptom(StrEnum):
    """Why an attention worker routes around an expert worker. The first two are about the process, and visible to all
    workers; the others only to the attention worker that sent it a request."""

    DIED = "died"  # the kernel marked its life word
    SILENT = "silent"  # no pulse
    DEAF = "deaf"  # it has a pulse, but does not answer
    BAD_REQUEST = "refused: bad request"
    NO_SUCH_SLOT = "refused: no such slot"  # out of range
    REFUSED = "refused"  # with an unknown status


DID_NOT_SERVE = frozenset({Symptom.DEAF, Symptom.BAD_REQUEST, Symptom.NO_SUCH_SLOT, Symptom.REFUSED})
