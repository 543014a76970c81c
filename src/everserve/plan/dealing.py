"""How rows are spread over expert workers: by attention worker, as routes deal them (tables/routes.py)."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from everserve.tables.ids import Rank
from everserve.tables.placement import Placement
from everserve.tables.routes import NO_RANK, Routes

Loads = Sequence[float]  # by expert, of one layer


class Dealing:
    """Which share of an expert's rows each of its active places gets, if all attention workers send as many."""

    def __init__(self, dealers: Sequence[Rank] = ()) -> None:
        self._dealers = tuple(dealers)
        self._shares = cache(self._shares_of)

    def shares(self, expert: int, num_active: int) -> tuple[float, ...]:
        """For the active places in the order of ranks."""
        return self._shares(expert % num_active, num_active)

    def _shares_of(self, expert: int, num_active: int) -> tuple[float, ...]:
        if not self._dealers:
            return (1 / num_active,) * num_active
        first = [(rank + expert) % num_active for rank in self._dealers]
        return tuple(first.count(place) / len(first) for place in range(num_active))


def work_of(placement: Placement, layer: int, loads: Loads, dealing: Dealing) -> dict[Rank, float]:
    """What each worker has to compute in one layer (by index), if everything is where it is planned."""
    homes: list[list[Rank]] = [[] for _ in loads]
    work = {seat.rank: 0.0 for seat in placement.seats}
    for seat in sorted(placement.seats, key=lambda seat: seat.rank):
        for expert in seat.active[layer]:
            homes[expert].append(seat.rank)
    for expert, ranks in enumerate(homes):
        for rank, share in zip(ranks, dealing.shares(expert, len(ranks)) if ranks else (), strict=True):
            work[rank] += share * loads[expert]
    return work


class Imbalance(NamedTuple):
    """Over all layers: what the busiest worker of each layer computes, over what it would if all had the same. A layer
    takes as long as its busiest worker. 0: there were no rows."""

    max_over_mean: float
    worst_layer: int  # index of the layer with the largest ratio


def imbalance(routes: Routes, loads: Mapping[int, Loads], dealers: Sequence[Rank]) -> Imbalance:
    """As rows are sent now, by these attention workers. `loads` by index of the layer."""
    ranks = np.unique(routes.array()[..., 0])
    ranks = ranks[ranks != NO_RANK]
    if not loads or not len(ranks):
        return Imbalance(0.0, 0)
    load_LE = np.zeros((routes.num_layers, routes.num_experts))
    for layer, load in loads.items():
        load_LE[layer] = load
    work_LR = np.zeros((routes.num_layers, int(ranks.max()) + 2))  # the last one: of experts without a place
    layer_L1 = np.arange(routes.num_layers)[:, None]
    for dealer in dealers or (Rank(0),):
        owner_LE = routes.seen_by(dealer)[:, :, 0, 0]
        np.add.at(work_LR, (layer_L1, owner_LE), load_LE / max(len(dealers), 1))
    work_LR = work_LR[:, ranks]
    max_L, mean_L = work_LR.max(axis=1), work_LR.mean(axis=1)
    if not mean_L.any():
        return Imbalance(0.0, 0)
    ratio_L = max_L / np.where(mean_L > 0, mean_L, 1.0)
    return Imbalance(float(max_L.sum() / mean_L.sum()), int(ratio_L.argmax()))
