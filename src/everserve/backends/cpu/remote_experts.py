"""RemoteExperts: the experts are in other processes (exchange.py says what happens when these fail).

Experts are pure functions and sums are in the order of k: so the result is the same, bit for bit, whatever happened.
"""

from collections.abc import Mapping

from torch import Tensor

from everserve.backends.cpu.exchange import Exchange
from everserve.model.ops import ExpertOps


class RemoteExperts:
    """`Experts` over lanes. `call_of`: the call of each layer; None: the one with the layer's number."""

    def __init__(self, exchange: Exchange, ops: ExpertOps, call_of: Mapping[int, int] | None = None) -> None:
        self.exchange = exchange
        self._ops = ops
        self._call_of = dict(call_of) if call_of is not None else {call: call for call in exchange.peers.moe_layers}
        self._num_experts = exchange.peers.num_experts
        self._hidden_size = exchange.peers.shape.hidden_size

    @property
    def num_replayed_rows(self) -> int:
        return self.exchange.num_replayed_rows

    @property
    def num_moved_rows(self) -> int:
        return self.exchange.num_moved_rows

    def do_meanwhile(self, function: int, argument: int) -> None:
        """`Exchange.do_meanwhile`."""
        self.exchange.do_meanwhile(function, argument)

    def begin_step(self, num_rows: int) -> None:
        self.exchange.begin_step()

    def end_step(self) -> None:
        self.exchange.end_step()

    def rest(self) -> None:
        """Nothing to do: between steps no expert worker waits for us."""

    def __call__(
        self, layer: int, ids_TK: Tensor, weights_TK: Tensor, hidden_TD: Tensor, residual_TD: Tensor
    ) -> Tensor:
        self.exchange.call(self._call_of[layer], ids_TK, hidden_TD, self._num_experts, self._hidden_size)
        return self._ops.combine_at(self.exchange.row_at, weights_TK, residual_TD)
