"""Experts now: how much each is used, and where it is, as the orchestrator sent it."""

from collections.abc import Iterator, Mapping

import numpy as np

from everserve.gateway.http.responses import (
    BalanceView,
    ExpertPlaceView,
    ExpertsMapView,
    ExpertsView,
    ExpertView,
    ImbalanceView,
    LayerView,
    encode_around,
    encode_list,
)
from everserve.tables.calls import ShardKind
from everserve.tables.ids import NO_RANK, Rank
from everserve.tables.routes import Routes
from everserve.tables.slots import Fill
from everserve.wire.messages import ExpertsChanged

Moves = Mapping[Rank, tuple[Fill, ...]]


class Experts:
    """What `/cluster/experts` shows. Without expert workers there is nothing to show."""

    def __init__(self) -> None:
        self._change: ExpertsChanged | None = None
        self._routes: Routes | None = None

    def on_changed(self, change: ExpertsChanged) -> None:
        if change.routes is not None:
            self._routes = change.routes
        self._change = change

    @property
    def max_over_mean(self) -> float:
        return self._change.max_over_mean if self._change is not None else 0.0

    @property
    def balance(self) -> dict[str, float]:
        """How even work is, by kind of shards."""
        change = self._change
        return {str(kind): ratio for kind, ratio in change.balance.items()} if change is not None else {}

    def view_balance(self) -> BalanceView:
        kinds = {kind: round(ratio, 3) for kind, ratio in self.balance.items()}
        return BalanceView(max_over_mean=max(kinds.values(), default=None), kinds=kinds)

    def pieces(self, moves: Moves) -> Iterator[bytes]:
        """The JSON of an `ExpertsView`, layer by layer."""
        start, end = encode_around(ExpertsView(layers=[], imbalance=self._imbalance()), b'"layers":[]')
        yield start
        yield from encode_list(self._layers(moves), num_per_piece=1)
        yield end

    def _layers(self, moves: Moves) -> Iterator[LayerView]:
        """Expert by expert."""
        change, routes = self._change, self._routes
        if change is None or routes is None:
            return
        load_LE, num_active_LE = self._load(change, routes), routes.num_active().tolist()
        kinds, widths = self._kinds(change), _widths(routes)
        moving = {(fill.call_index, fill.expert) for fills in moves.values() for fill in fills}
        masked = set(routes.masked_experts())
        places_LECR = routes.array()
        for index, number in enumerate(change.moe_layers):
            experts = [
                ExpertView(
                    expert=expert,
                    load=load_LE[index][expert],
                    moving=(index, expert) in moving,
                    masked=(index, expert) in masked,
                    places=[
                        ExpertPlaceView(rank=rank, slot=slot, active=i < num_active_LE[index][expert])
                        for i, (rank, slot) in enumerate(places)
                        if rank != NO_RANK
                    ],
                )
                for expert, places in enumerate(places_LECR[index, : widths[index]].tolist())
            ]
            yield LayerView(layer=number, kind=kinds[index], experts=experts)

    def map(self, moves: Moves) -> ExpertsMapView:
        """The same as tables of numbers, for the dashboard: large models have thousands of experts."""
        change, routes = self._change, self._routes
        if change is None or routes is None:
            return ExpertsMapView(
                layers=[], kinds=[], load=[], places=[], active=[], moving=[], masked=[], imbalance=self._imbalance()
            )
        places_LE: list[list[int]] = np.count_nonzero(routes.array()[..., 0] != NO_RANK, axis=2).tolist()
        active_LE: list[list[int]] = routes.num_active().tolist()
        widths = _widths(routes)
        return ExpertsMapView(
            layers=list(change.moe_layers),
            kinds=self._kinds(change),
            load=[row[:width] for row, width in zip(self._load(change, routes), widths, strict=True)],
            places=[row[:width] for row, width in zip(places_LE, widths, strict=True)],
            active=[row[:width] for row, width in zip(active_LE, widths, strict=True)],
            moving=sorted({(fill.call_index, fill.expert) for fills in moves.values() for fill in fills}),
            masked=list(routes.masked_experts()),
            imbalance=self._imbalance(),
        )

    def _kinds(self, change: ExpertsChanged) -> list[str]:
        return [str(kind) for kind in change.kinds or (ShardKind.EXPERT,) * len(change.moe_layers)]

    def _load(self, change: ExpertsChanged, routes: Routes) -> list[list[float]]:
        load_LE = np.frombuffer(change.load, np.float32).reshape(routes.num_layers, routes.num_experts)
        table: list[list[float]] = load_LE.astype(np.float64).round(1).tolist()
        return table

    def _imbalance(self) -> ImbalanceView:
        if self._change is None or not self._change.max_over_mean:
            return ImbalanceView(max_over_mean=None, worst_layer=None)
        ratio = round(self._change.max_over_mean, 3)
        return ImbalanceView(max_over_mean=ratio, worst_layer=self._change.worst_layer)


def _widths(routes: Routes) -> list[int]:
    """How many experts each layer has."""
    widths: list[int] = routes.exists().sum(axis=1).tolist()
    return widths
