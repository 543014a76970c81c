"""Calls: how a captured step asks the shards of one call, of whatever kind, and waits for their answers.

Recorded, for each call:   plan -> post | wait for all flags -> collect, of this kind
                           (one kernel does both, if every row goes to all shards: send_all.py)

The part before the | is recorded a second time, aside: it sends the rows again, to other places.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from everserve.backends.cuda.lanes import send
from everserve.backends.cuda.lanes.lane import FLAG_AT
from everserve.backends.cuda.lanes.send import SendState
from everserve.backends.cuda.lanes.send_all import MAX_TOKENS, post_to_all

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

    def __call__(self, call: int, ids_TK: Tensor, x_TD: Tensor, to_all: bool = False) -> Tensor:
        """y_row_TK: where the answers are, if they are there. `to_all`: every row goes to all shards of the call."""
        y_row_TK = self.send(call, ids_TK, x_TD, is_replay=False, to_all=to_all)

        def send_again() -> None:
            again_TK = self.send(call, ids_TK, x_TD, is_replay=True, to_all=to_all)
            y_row_TK.copy_(again_TK)  # rows lie elsewhere now

        self._cut(send_again)
        self._wait(self._flags)
        return y_row_TK

    def send(self, call: int, ids_TK: Tensor, x_TD: Tensor, is_replay: bool, to_all: bool = False) -> Tensor:
        """plan and post: y_row_TK."""
        state, place_of_N, expert_at_P = self.state, self._peers.place_of_LN[call], self._peers.expert_at_LP[call]
        next_call = (call + 1) % len(self._peers.place_of_LN)  # after the last call comes the next step's first one
        if to_all and len(x_TD) <= MAX_TOKENS:
            return post_to_all(state, x_TD, ids_TK, place_of_N, expert_at_P, call, next_call, is_replay)
        y_row_TK = send.plan(state, ids_TK, place_of_N, expert_at_P, call)
        send.post(state, x_TD, y_row_TK, call, next_call, replay=is_replay)
        return y_row_TK
