"""What the gateway shows of experts: load and places, sent at most once a second while something changes."""

import numpy as np

from everserve.control.decide.machine import Machine
from everserve.control.decide.scaling import staying
from everserve.control.tell.to_gateway import GatewayEnds
from everserve.plan.dealing import Imbalance, balance, imbalance
from everserve.tables.ids import Epoch, Role
from everserve.wire.messages import ExpertsChanged

_EVERY_S = 1.0
_NO_LOAD = 0.5  # rows per second, over all experts: what is left of older ones


class ExpertsView:
    """Remembers what the gateway has."""

    def __init__(self, gateway: GatewayEnds) -> None:
        self._gateway = gateway
        self._told_s = float("-inf")
        self._routes_told: Epoch | None = None
        self._had_load = False
        self._num_gateways = gateway.num_attached

    def flush(self, machine: Machine, now: float) -> None:
        """Send what is due."""
        placement, routes = machine.goal.placement, machine.routes
        if self._num_gateways != self._gateway.num_attached:  # this one has nothing
            self._num_gateways, self._routes_told, self._told_s = self._gateway.num_attached, None, float("-inf")
        if placement is None or routes is None or now - self._told_s < _EVERY_S:
            return
        load_LE = machine.balancer.loads.per_s(now)
        has_load = bool(load_LE.sum() > _NO_LOAD)
        are_new = routes.epoch != self._routes_told
        if not (are_new or has_load or self._had_load):
            return
        kinds = tuple(call.kind for call in placement.calls)
        device_of = {seat.rank: seat.device for seat in staying(machine.goal) if Role.ATTENTION not in seat.roles}
        measured = machine.balancer.measured(len(device_of))
        found = Imbalance(0.0, 0)
        if has_load:
            found = imbalance(routes, machine.balancer.loads.by_layer(now))
        self._gateway.send(
            ExpertsChanged(
                moe_layers=placement.moe_layers,
                load=load_LE.astype(np.float32).tobytes(),
                max_over_mean=found.max_over_mean,
                worst_layer=placement.moe_layers[found.worst_layer],
                routes=routes if are_new else None,
                kinds=kinds,
                balance=balance(routes, kinds, measured, device_of),
            )
        )
        self._told_s, self._routes_told, self._had_load = now, routes.epoch, has_load
