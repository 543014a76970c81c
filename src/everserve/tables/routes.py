"""Routes: logical expert -> ordered candidates (rank, slot), per layer, at one epoch.

An expert may have several *active* candidates, the first `num_active` ones. Its rows are dealt among them by attention
worker (dealing.py): each asks one active candidate first, then the active ones after it, then the others. So each
attention worker still has one place for each expert, and results do not depend on which.

An expert may be *masked*: it has no place, and attention workers exclude it before they choose the top k experts of a
token. What was computed under a mask differs from what would have been computed without it.
"""

from collections.abc import Collection
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from everserve.tables.dealing import Dealer, deal
from everserve.tables.ids import NO_RANK, Epoch, Rank, SlotId

_DTYPE = np.dtype("<i2")


class Routes(msgspec.Struct, frozen=True, kw_only=True):
    """The table, packed: it is read by index in every layer and sent on every change.

    `table` is int16 [call][expert][candidate][rank, slot]; where there are fewer candidates than
    `num_candidates`, the last ones are (-1, -1). `active` is uint8 [call][expert]: how many of the candidates
    are active; empty if no expert has more than one. `masked` is uint8 [call][expert]: 1 if the expert is
    excluded before top-k; empty if none is. `mask_id` numbers the sets of masked experts of an instance: 0 if none is
    masked, otherwise a higher number for each different set that follows. `widths`: how many experts each layer has,
    where that differs; the others up to `num_experts` do not exist, and have no candidates. `dealers`: the attention
    workers among which rows are dealt.
    """

    epoch: Epoch
    num_layers: int
    num_experts: int
    num_candidates: int
    table: bytes
    active: bytes = b""
    masked: bytes = b""
    mask_id: int = 0
    widths: tuple[int, ...] = ()
    dealers: tuple[Dealer, ...] = ()

    def __post_init__(self) -> None:
        if self.widths and (len(self.widths) != self.num_layers or max(self.widths) > self.num_experts):
            raise ValueError(f"numbers of experts for {len(self.widths)} layers of {self.num_layers}, or too large")
        if self.masked and len(self.masked) != self.num_layers * self.num_experts:
            raise ValueError(f"a mask of {len(self.masked)} experts for another number of experts")
        if bool(self.masked) != bool(self.mask_id):
            raise ValueError(f"mask {self.mask_id} with {sum(self.masked)} masked experts")
        if self.active and len(self.active) != self.num_layers * self.num_experts:
            raise ValueError(f"{len(self.active)} numbers of active candidates for another number of experts")
        expected = self.num_layers * self.num_experts * self.num_candidates * 2 * _DTYPE.itemsize
        if len(self.table) != expected:
            raise ValueError(f"a routes table of {len(self.table)} bytes where {expected} are expected")

    @classmethod
    def of(
        cls,
        epoch: Epoch,
        candidates: list[list[list[tuple[Rank, SlotId]]]],
        num_active: list[list[int]] | None = None,
    ) -> "Routes":
        """Routes from nested lists [call][expert] -> candidates in order, and how many are active (one)."""
        widths = tuple(map(len, candidates))
        num_layers, num_experts = len(candidates), max(widths, default=0)
        width = max((len(one) for layer in candidates for one in layer), default=0)
        table = np.full((num_layers, num_experts, width, 2), NO_RANK, _DTYPE)
        at = [(i, e, k) for i, layer in enumerate(candidates) for e, ones in enumerate(layer) for k in range(len(ones))]
        if at:
            places = [place for layer in candidates for ones in layer for place in ones]
            table[tuple(np.array(at).T)] = places
        return cls(
            epoch=epoch,
            num_layers=num_layers,
            num_experts=num_experts,
            num_candidates=width,
            table=table.tobytes(),
            active=_packed(num_active, num_experts) if num_active is not None else b"",
            widths=widths if len(set(widths)) > 1 else (),
        )

    def array(self) -> "np.ndarray[tuple[int, int, int, int], np.dtype[np.int16]]":
        """[call][expert][candidate][rank, slot], read-only."""
        shape = (self.num_layers, self.num_experts, self.num_candidates, 2)
        return np.frombuffer(self.table, _DTYPE).reshape(shape)

    def num_active(self) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
        """[call][expert], read-only; 1 also where there is no candidate."""
        shape = (self.num_layers, self.num_experts)
        return np.frombuffer(self.active, np.uint8).reshape(shape) if self.active else np.ones(shape, np.uint8)

    def seen_by(self, rank: Rank) -> "np.ndarray[tuple[int, int, int, int], np.dtype[np.int16]]":
        """The table in the order in which this attention worker asks: active candidates are rotated."""
        if not self.active or self.num_candidates < 2:
            return self.array()
        several_2N = np.nonzero(self.num_active() > 1)
        first_LE1 = np.zeros((self.num_layers, self.num_experts, 1), np.int64)
        first_LE1[several_2N] = self._first_asked(rank, several_2N)[:, None]
        candidate_C, num_active_LE1 = np.arange(self.num_candidates), self.num_active()[..., None].astype(np.int64)
        source_LEC = np.where(candidate_C < num_active_LE1, (candidate_C + first_LE1) % num_active_LE1, candidate_C)
        return np.take_along_axis(self.array(), source_LEC[..., None], axis=2)

    def _first_asked(self, rank: Rank, several_2N: "tuple[NDArray[np.int64], ...]") -> "NDArray[np.int64]":
        """By this attention worker, of experts with several active candidates. One that should leave asks anywhere."""
        num_active_N = self.num_active()[several_2N].astype(np.int64)
        numbers = [number for number, dealer in enumerate(self.dealers) if dealer.home == rank]
        if not numbers:
            return np.remainder(rank + several_2N[1], num_active_N)
        alike_NX = np.column_stack([self.array()[several_2N][..., 0], num_active_N, several_2N[1]])
        distinct_MX, which_N = np.unique(alike_NX, axis=0, return_inverse=True)
        chosen_DM = deal(self.dealers, distinct_MX[:, :-2], distinct_MX[:, -2], distinct_MX[:, -1])
        return np.asarray(chosen_DM[numbers[0]][which_N.reshape(-1)])

    def with_mask(self, experts: Collection[tuple[int, int]], mask_id: int) -> "Routes":
        """The same routes with these (call, expert) masked."""
        mask_LE = np.zeros((self.num_layers, self.num_experts), np.uint8)
        for layer, expert in experts:
            mask_LE[layer, expert] = 1
        masked = mask_LE.tobytes() if experts else b""
        return msgspec.structs.replace(self, masked=masked, mask_id=mask_id if experts else 0)

    def mask(self) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
        """[call][expert], read-only: 1 where an expert is masked."""
        shape = (self.num_layers, self.num_experts)
        return np.frombuffer(self.masked, np.uint8).reshape(shape) if self.masked else np.zeros(shape, np.uint8)

    def masked_experts(self) -> tuple[tuple[int, int], ...]:
        """(call, expert) of every masked expert, in order."""
        if not self.masked:
            return ()
        return tuple((int(layer), int(expert)) for layer, expert in np.argwhere(self.mask()))

    def lost_experts(self) -> tuple[tuple[int, int], ...]:
        """(call, expert) of every expert that no worker can compute now, masked or not."""
        return tuple((int(layer), int(expert)) for layer, expert in np.argwhere(self._is_lost()))

    @property
    def num_lost(self) -> int:
        """How many experts that are, over all layers."""
        return int(self._is_lost().sum())

    def exists(self) -> "np.ndarray[tuple[int, int], np.dtype[np.bool_]]":
        """[call][expert]: whether the layer has so many."""
        widths_L = np.array(self.widths or (self.num_experts,) * self.num_layers, np.int64)
        return np.arange(self.num_experts) < widths_L[:, None]

    @property
    def num_without_place(self) -> int:
        """Experts that no worker can compute now and that tokens may need, over all layers: a masked one is not
        asked for."""
        return int((self._is_lost() & (self.mask() == 0)).sum())

    def _is_lost(self) -> "np.ndarray[tuple[int, int], np.dtype[np.bool_]]":
        is_lost_LE = self.exists()
        if self.num_candidates:
            is_lost_LE &= self.array()[:, :, 0, 0] == NO_RANK
        return is_lost_LE

    @property
    def num_survivable(self) -> int:
        """How many expert workers may die at once, whichever they are, without leaving an expert without a place."""
        if self.num_candidates == 0:
            return 0
        num_places_LE = (self.array()[..., 0] != NO_RANK).sum(-1)
        is_needed_LE = self.exists() & (self.mask() == 0)
        return max(0, int(num_places_LE[is_needed_LE].min(initial=self.num_candidates)) - 1)

    def candidates(self, call_index: int, expert: int) -> tuple[tuple[Rank, SlotId], ...]:
        places = self.array()[call_index, expert].tolist()
        return tuple((Rank(rank), SlotId(slot)) for rank, slot in places if rank != NO_RANK)


def _packed(num_active: list[list[int]], num_experts: int) -> bytes:
    table = np.array([row + [1] * (num_experts - len(row)) for row in num_active], np.uint8)
    return table.tobytes() if (table > 1).any() else b""


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
