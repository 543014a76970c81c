"""What changes from one table of routes to a later one: a loss or a return changes the rows of few experts.

Whole routes are sent to a worker once, or when what it has is not what a delta is about: it knows by the epoch. A delta
that comes late, twice or without the one before it changes nothing.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from everserve.tables.dealing import Dealer
from everserve.tables.ids import NO_RANK, Epoch
from everserve.tables.routes import Routes

_ROW = np.dtype("<u4")
_PLACE = np.dtype("<i2")


class RoutesDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The routes of `epoch`, where those of epoch `base` are known. `rows` is uint32: the numbers (call * num_experts +
    expert) of the experts that have other candidates, another number of active ones, or are masked or no longer.
    `table`, `active` and `masked` are as in `Routes`, for these rows. `dealers`: None if they are the same."""

    epoch: Epoch
    base: Epoch
    num_candidates: int
    rows: bytes
    table: bytes
    active: bytes
    masked: bytes
    mask_id: int
    dealers: tuple[Dealer, ...] | None = None


def delta_of(before: Routes, after: Routes) -> RoutesDelta | None:
    """None: the routes have to be sent whole, because they are for another model, or most of them have changed."""
    if _shape(before) != _shape(after) or after.epoch <= before.epoch:
        return None
    width = max(before.num_candidates, after.num_candidates)
    differs_K = (_candidates(before, width) != _candidates(after, width)).any(axis=1)
    differs_K |= (before.num_active() != after.num_active()).reshape(-1)
    differs_K |= (before.mask() != after.mask()).reshape(-1)
    row_N = np.flatnonzero(differs_K)
    if 2 * len(row_N) > len(differs_K):
        return None
    return RoutesDelta(
        epoch=after.epoch,
        base=before.epoch,
        num_candidates=after.num_candidates,
        rows=row_N.astype(_ROW).tobytes(),
        table=_candidates(after, after.num_candidates)[row_N].tobytes(),
        active=after.num_active().reshape(-1)[row_N].tobytes(),
        masked=after.mask().reshape(-1)[row_N].tobytes(),
        mask_id=after.mask_id,
        dealers=None if before.dealers == after.dealers else after.dealers,
    )


def patched(before: Routes, delta: RoutesDelta) -> Routes:
    """The routes of the delta's epoch. Raises ValueError if it is not about these."""
    if before.epoch != delta.base:
        raise ValueError(f"a delta from epoch {delta.base} on, and these are routes of epoch {before.epoch}")
    row_N = np.frombuffer(delta.rows, _ROW)
    table_KC = _candidates(before, delta.num_candidates)
    table_KC[row_N] = np.frombuffer(delta.table, _PLACE).reshape(len(row_N), 2 * delta.num_candidates)
    active_K, masked_K = before.num_active().reshape(-1).copy(), before.mask().reshape(-1).copy()
    active_K[row_N] = np.frombuffer(delta.active, np.uint8)
    masked_K[row_N] = np.frombuffer(delta.masked, np.uint8)
    return msgspec.structs.replace(
        before,
        epoch=delta.epoch,
        num_candidates=delta.num_candidates,
        table=table_KC.tobytes(),
        active=active_K.tobytes() if (active_K > 1).any() else b"",
        masked=masked_K.tobytes() if delta.mask_id else b"",
        mask_id=delta.mask_id,
        dealers=before.dealers if delta.dealers is None else delta.dealers,
    )


def _shape(routes: Routes) -> tuple[object, ...]:
    return routes.num_layers, routes.num_experts, routes.widths


def _candidates(routes: Routes, width: int) -> NDArray[np.int16]:
    """[call and expert][candidates, each rank and slot], with so many of them: a copy."""
    num = min(width, routes.num_candidates)
    rows_KC = np.full((routes.num_layers * routes.num_experts, 2 * width), NO_RANK, _PLACE)
    rows_KC[:, : 2 * num] = routes.array().reshape(len(rows_KC), 2 * routes.num_candidates)[:, : 2 * num]
    return rows_KC


class KnownRoutes:
    """What a worker has been told. Messages of several orchestrators may come in any order, twice or not at all."""

    def __init__(self) -> None:
        self._latest: Routes | None = None

    @property
    def epoch(self) -> Epoch:
        """0: none."""
        return self._latest.epoch if self._latest is not None else Epoch(0)

    def take(self, routes: Routes) -> Routes:
        """It is told these."""
        if routes.epoch >= self.epoch:
            self._latest = routes
        return routes

    def patch(self, delta: RoutesDelta) -> Routes | None:
        """The routes that follow from what it is told; None if it does not have the ones that the delta is about."""
        if self._latest is None or self._latest.epoch != delta.base:
            return None
        return self.take(patched(self._latest, delta))

    def lacks(self, delta: RoutesDelta) -> bool:
        """Whether this is about later routes: whole ones have to be asked for. Else it comes late."""
        return self.epoch < delta.epoch and self.epoch != delta.base
