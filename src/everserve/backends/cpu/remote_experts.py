"""RemoteExperts: the experts are in other processes (exchange.py says what happens when these fail).

Experts are pure functions and sums are in the order of k: so the result is the same, bit for bit, whatever happened.
"""

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from everserve.backends.cpu.exchange import Exchange
from everserve.backends.cpu.lane import load
from everserve.model.ops import ExpertOps


class SeamInC(NamedTuple):
    """Addresses, for C that computes whole layers (csrc/ops/layers.c)."""

    cross: int  # a function
    seam: int
    row_at: int


class RemoteExperts:
    """`Experts` over lanes. `call_of`: the call of each layer; None: the one with the layer's number."""

    def __init__(self, exchange: Exchange, ops: ExpertOps, call_of: Mapping[int, int] | None = None) -> None:
        self.exchange = exchange
        self._ops = ops
        self._call_of = dict(call_of) if call_of is not None else {call: call for call in exchange.peers.calls}
        self._num_experts = exchange.peers.num_shards
        self._hidden_size = exchange.peers.shape.hidden_size
        self._seam, self._kept = exchange.seam(self._call_of, self._num_experts, self._hidden_size)
        cross = ctypes.cast(load().blocking.es_lane_cross, ctypes.c_void_p).value
        assert cross is not None
        self._in_c = SeamInC(cross, ctypes.addressof(self._seam), exchange.row_at)

    @property
    def num_replayed_rows(self) -> int:
        return self.exchange.healing.num_replayed_rows

    @property
    def num_moved_rows(self) -> int:
        return self.exchange.healing.num_moved_rows

    def do_meanwhile(self, function: int, argument: int) -> None:
        """`Exchange.do_meanwhile`."""
        self.exchange.do_meanwhile(function, argument)

    def begin_step(self, num_rows: int) -> None:
        self.exchange.begin_step()

    def end_step(self) -> None:
        self.exchange.end_step()

    def rest(self) -> None:
        """Nothing to do: between steps no expert worker waits for us."""

    def cross_in_c(self, num_tokens: int, most_shards: int) -> SeamInC:
        """For a step of so many rows. C says where it could not cross: `heal`, then ask for this again, since routes
        may have changed."""
        shape = self.exchange.peers.shape
        assert num_tokens <= shape.max_tokens and most_shards <= shape.top_k
        assert num_tokens * most_shards * self._hidden_size <= shape.y_floats
        self._seam.epoch = self.exchange.peers.epoch
        return self._in_c

    def heal(self, outcome: int, layer: int) -> None:
        """The answers of this layer are complete when this returns."""
        self.exchange.heal(outcome, self._call_of[layer])

    def __call__(
        self, layer: int, ids_TK: Tensor, weights_TK: Tensor, hidden_TD: Tensor, residual_TD: Tensor
    ) -> Tensor:
        self.exchange.call(self._call_of[layer], ids_TK, hidden_TD, self._num_experts, self._hidden_size)
        return self._ops.combine_at(self.exchange.row_at, weights_TK, residual_TD)
