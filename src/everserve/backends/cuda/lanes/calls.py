"""Calls: how a captured step asks the shards of one call, of whatever kind, and waits for their answers.

Recorded, for each call:   plan -> post | wait for all flags -> collect, of this kind

The part before the | is recorded a second time, aside: it sends the rows again, to other places.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from everserve.backends.cuda.lanes import send
from everserve.backends.cuda.lanes.lane import FLAG_AT
from everserve.backends.cuda.lanes.send import SendState

Cut = Callable[[Callable[[], None]], None]


class PlaceTables(Protocol):
    """What is needed of `CudaPeers`."""

    state: SendState
    place_of_LN: Tensor
    expert_at_LP: Tensor
    expert_ranks: range


class Calls:
    """`cut(aside)`: where the recording may be taken up again; `aside` is recorded for that case. `wait(flags)`: lets
    the stream wait until none of these words is negative."""

    def __init__(self, peers: PlaceTables, cut: Cut, wait: Callable[[Sequence[int]], None]) -> None:
        self.state = peers.state
        self._peers = peers
        self._cut = cut
        self._wait = wait
        shape = self.state.shape
        self._flags = [self.state.region + rank * shape.lane_bytes() + FLAG_AT for rank in peers.expert_ranks]

    def __call__(self, call: int, ids_TK: Tensor, x_TD: Tensor) -> Tensor:
        """y_row_TK: where the answers are, if they are there."""
        y_row_TK = self.send(call, ids_TK, x_TD, is_replay=False)

        def send_again() -> None:
            y_row_TK.copy_(self.send(call, ids_TK, x_TD, is_replay=True))  # rows lie elsewhere now

        self._cut(send_again)
        self._wait(self._flags)
        return y_row_TK

    def send(self, call: int, ids_TK: Tensor, x_TD: Tensor, is_replay: bool) -> Tensor:
        """plan and post: y_row_TK."""
        peers, state = self._peers, self.state
        y_row_TK = send.plan(state, ids_TK, peers.place_of_LN[call], peers.expert_at_LP[call], call)
        # After the last call comes the first one of the next step.
        send.post(state, x_TD, y_row_TK, call, (call + 1) % len(peers.place_of_LN), replay=is_replay)
        return y_row_TK
