"""A device that hangs: its worker's lease must end. Waiting for a peer renews the lease, because the peer is given up
in the end."""

from types import SimpleNamespace

import pytest

from everserve.backends.cuda.lanes.remote_experts import CudaExperts
from everserve.seam.healing import NO_REPORTS
from everserve.seam.outcomes import Outcome
from everserve.tables.ids import Incarnation, Rank

PEER = Rank(2)


class Warden:
    def __init__(self) -> None:
        self.alarm, self.num_renewals = 0, 0

    def renew(self, seconds: float | None = None) -> None:
        self.num_renewals += 1


class Peers:
    """One expert worker, which has something to answer or not."""

    def __init__(self, is_waited_for: bool) -> None:
        self.warden, self.cell = Warden(), SimpleNamespace(control=0)
        self.calls, self.expert_ranks = (0,), [PEER]
        self.incarnations, self.given_up = [(PEER, Incarnation(1))], []
        self.state = SimpleNamespace(region=0, shape=SimpleNamespace(lane_bytes=lambda: 4096))
        self._is_waited_for = is_waited_for

    def trusted(self, rank: Rank) -> SimpleNamespace:
        return SimpleNamespace(rank=rank, cell=SimpleNamespace(idle=False))

    def is_awaited(self, rank: Rank) -> bool:
        return self._is_waited_for

    def last_answer(self, rank: Rank) -> int:
        return 7

    def look(self) -> list:
        return []


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_only_waiting_for_a_peer_renews_the_lease(is_waited_for: bool) -> None:
    peers = Peers(is_waited_for)
    experts = CudaExperts(
        peers, None, None, None, NO_REPORTS, detect_ms=20.0, lease_s=120.0
    )  # fmt: skip
    for outcome in (Outcome.TIMEOUT, Outcome.ATTEND, Outcome.TIMEOUT):
        experts._attend(outcome)
    assert (peers.warden.num_renewals > 0) is is_waited_for
