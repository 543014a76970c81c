"""How rows are spread over expert workers: by attention worker, as routes deal them (tables/dealing.py)."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from everserve.tables.calls import ShardKind
from everserve.tables.dealing import Dealer, deal
from everserve.tables.ids import NO_RANK, Rank
from everserve.tables.placement import Placement
from everserve.tables.routes import Routes

Loads = Sequence[float]  # by expert, of one layer


class Dealing:
    """Which share of an expert's rows each of its active places gets, if all attention workers send as many."""

    def __init__(self, dealers: Sequence[Dealer] = ()) -> None:
        self._dealers = tuple(dealers)
        self._shares = cache(self._shares_of)

    def shares(self, expert: int, places: Sequence[Rank]) -> tuple[float, ...]:
        """The shares of these active places, in the order of ranks."""
        return self._shares(expert % len(places), tuple(places))

    def _shares_of(self, expert: int, places: tuple[Rank, ...]) -> tuple[float, ...]:
        if not self._dealers:
            return (1 / len(places),) * len(places)
        chosen = deal(self._dealers, np.array([places]), np.array([len(places)]), np.array([expert]))
        counts = np.bincount(chosen[:, 0], minlength=len(places))
        return tuple((counts / len(self._dealers)).tolist())


def work_of(placement: Placement, layer: int, loads: Loads, dealing: Dealing) -> dict[Rank, float]:
    """What each worker has to compute in one layer (by index), if everything is where it is planned."""
    homes: list[list[Rank]] = [[] for _ in loads]
    work = {seat.rank: 0.0 for seat in placement.seats}
    for seat in sorted(placement.seats, key=lambda seat: seat.rank):
        for expert in seat.active[layer]:
            homes[expert].append(seat.rank)
    for expert, ranks in enumerate(homes):
        for rank, share in zip(ranks, dealing.shares(expert, ranks) if ranks else (), strict=True):
            work[rank] += share * loads[expert]
    return work


class Imbalance(NamedTuple):
    """Over all layers: what the busiest worker of each layer computes, over what it would if all had the same. A layer
    takes as long as its busiest worker. 0: there were no rows."""

    max_over_mean: float
    worst_layer: int  # index of the layer with the largest ratio


def imbalance(routes: Routes, loads: Mapping[int, Loads]) -> Imbalance:
    """How uneven the load is, as rows are sent now. `loads` by index of the layer."""
    ranks = np.unique(routes.array()[..., 0])
    ranks = ranks[ranks != NO_RANK]
    if not loads or not len(ranks):
        return Imbalance(0.0, 0)
    load_LE = np.zeros((routes.num_layers, routes.num_experts))
    for layer, load in loads.items():
        load_LE[layer] = load
    work_LR = np.zeros((routes.num_layers, int(ranks.max()) + 2))  # the last one: of experts without a place
    layer_L1 = np.arange(routes.num_layers)[:, None]
    homes = [dealer.home for dealer in routes.dealers] or [Rank(0)]
    for home in homes:
        owner_LE = routes.seen_by(home)[:, :, 0, 0]
        np.add.at(work_LR, (layer_L1, owner_LE), load_LE / len(homes))
    work_LR = work_LR[:, ranks]
    max_L, mean_L = work_LR.max(axis=1), work_LR.mean(axis=1)
    if not mean_L.any():
        return Imbalance(0.0, 0)
    ratio_L = max_L / np.where(mean_L > 0, mean_L, 1.0)
    return Imbalance(float(max_L.sum() / mean_L.sum()), int(ratio_L.argmax()))


def balance(
    routes: Routes, kinds: Sequence[ShardKind], loads: Mapping[int, Loads], device_of: Mapping[Rank, int]
) -> dict[ShardKind, float]:
    """How even the work is, for each kind of shards: the work of the busiest device, over all calls, over the mean of
    these devices. As rows are sent now; shards of a call without `loads` count as one each. `device_of`: expert workers
    that there should be.
    """
    devices = sorted(set(device_of.values()))
    if not devices or not routes.num_candidates:
        return {}
    column_R = np.full(1 + max(device_of), len(devices))
    for rank, device in device_of.items():
        column_R[rank] = devices.index(device)
    load_LE = routes.exists().astype(np.float64)
    for index, load in loads.items():
        if any(load):
            load_LE[index, : len(load)] = np.array(load) * len(load) / sum(load)
    work_LD = np.zeros((routes.num_layers, len(devices) + 1))  # the last one: of other workers, and of none
    layer_L1 = np.arange(routes.num_layers)[:, None]
    homes = [dealer.home for dealer in routes.dealers] or [Rank(0)]
    for home in homes:
        owner_LE = routes.seen_by(home)[:, :, 0, 0]
        is_known_LE = (owner_LE != NO_RANK) & (owner_LE < len(column_R))
        column_LE = np.where(is_known_LE, column_R[np.where(is_known_LE, owner_LE, 0)], len(devices))
        np.add.at(work_LD, (layer_L1, column_LE), load_LE / len(homes))
    found = {}
    for kind in dict.fromkeys(kinds):
        work_D = work_LD[[one is kind for one in kinds], :-1].sum(axis=0)
        if work_D.any():
            found[kind] = float(work_D.max() / work_D.mean())
    return found
