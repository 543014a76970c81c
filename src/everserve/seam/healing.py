"""Healing: what is decided while the answers of a call do not come, whatever computes it and wherever.

    the alarm rang              peers that died or fell silent are suspected
    the control word changed    the orchestrator's messages are read: peers and routes may change
    no answer for detect_ms     a peer that lives and does not get on is looked at, and suspected after some looks
    an answer says no           its sender is suspected
    an answer says moved        a slot holds another expert than our routes say: no suspicion, the next candidate
    then                        the rows of suspects that have no answer yet go to the next candidates, as replays
    a shard has no candidate    StepAbandoned: the step is rolled back and repeated later
    a head's KV is elsewhere    or its pool is another one than before: KvLost, it has to be fetched first

What rows are computed from does not change, and shards are pure functions (of their KV, too): so answers are the same,
bit for bit, whatever happened.

How rows are sent, and how their answers are awaited, depends on the device (backends/cpu/exchange.py,
backends/cuda/lanes/remote_experts.py). Reports can wait until rows are sent again; rows cannot.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from everserve.errors import KvLost, StepAbandoned
from everserve.seam.outcomes import SYMPTOMS
from everserve.seam.trust import Peer, Peers, Suspicion
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.routes import Symptom


@dataclass(frozen=True)
class Reports:
    """Whom an attention worker's exchange tells.

    on_control()                              read the control socket; may call any method of `Peers`
    on_suspect(rank, incarnation, reason)     a peer is routed around from now on
    on_replay(suspect, layer, num_rows)       its rows were sent to other peers
    """

    on_control: Callable[[], None]
    on_suspect: Callable[[Rank, Incarnation, Symptom], None]
    on_replay: Callable[[Rank, int, int], None]


NO_REPORTS = Reports(lambda: None, lambda rank, incarnation, reason: None, lambda suspect, layer, num_rows: None)


class Healing:
    """`give_up`: after so many looks in a row, detect_ms apart, at a peer that lives and does not get on. The lease is
    renewed with the warden while a peer is looked at, for `lease_s` (None: as long as the step's). `layer_of`: the
    layer of each call."""

    def __init__(
        self, peers: Peers, reports: Reports, give_up: int, lease_s: float | None, layer_of: Mapping[int, int]
    ) -> None:
        self.num_replayed_rows = 0  # that were sent to another peer
        self.num_moved_rows = 0  # of requests that were answered "moved"
        self._peers = peers
        self._reports = reports
        self._give_up = give_up
        self._lease_s = lease_s
        self._layer_of = layer_of
        self._num_looks: dict[Rank, int] = {}

    def words(self) -> tuple[int, int]:
        """The alarm and the control word. They are read before what they are about: what comes later rings again."""
        return self._peers.warden.alarm, self._peers.cell.control

    def attend(self) -> list[Suspicion]:
        """One of the two has changed."""
        suspicions = self._peers.look()
        self._reports.on_control()
        return suspicions

    def read_control(self) -> None:
        """Likewise if nothing has rung: who rings may have died before."""
        self._reports.on_control()

    # -- peers that do not get on ----------------------------------------------------------------

    def begin_looks(self) -> None:
        self._num_looks.clear()

    def renew_lease(self) -> None:
        """We wait for a peer."""
        self._peers.warden.renew(self._lease_s)

    def look(self, peer: Peer, is_stuck: bool) -> int:
        """How often in a row it has not got on."""
        self._num_looks[peer.rank] = self._num_looks.get(peer.rank, 0) + 1 if is_stuck else 0
        return self._num_looks[peer.rank]

    def suspect_the_deaf(self, peers: Iterable[Peer]) -> list[Suspicion]:
        deaf = [peer for peer in peers if self._num_looks.get(peer.rank, 0) >= self._give_up]
        return [self._peers.suspect(peer, Symptom.DEAF) for peer in deaf]

    # -- answers that say no ---------------------------------------------------------------------

    def note_moved(self, rank: Rank, call: int, places: set[tuple[int, int]]) -> bool:
        """What it holds in these (slot, expert) is not what our routes say. False: it does not say which."""
        if places:
            self._peers.note_moved(rank, call, places)
        return bool(places)

    def suspect(self, peer: Peer, status: int) -> Suspicion:
        """It could not compute the request: the next routes resolve that, or it is replaced."""
        return self._peers.suspect(peer, SYMPTOMS.get(status, Symptom.REFUSED))

    # -- what cannot be healed here --------------------------------------------------------------

    def abandoned(self, call: int, missing: Iterable[int]) -> StepAbandoned:
        """Answers that are still out will be counted as stale when they come."""
        return StepAbandoned(self._layer_of[call], tuple(missing))

    def kv_is_elsewhere(self, call: int) -> KvLost:
        return KvLost(self._layer_of[call], "heads have to be computed elsewhere than where their KV is")

    def kv_is_lost(self, call: int) -> KvLost:
        return KvLost(self._layer_of[call], "a worker has not the KV that streams were computed with")

    # -- reports ---------------------------------------------------------------------------------

    def tell(self, suspicions: Iterable[Suspicion]) -> None:
        for suspicion in suspicions:
            self._reports.on_suspect(*suspicion)

    def tell_replay(self, rank: Rank, call: int, num_rows: int) -> None:
        self._reports.on_replay(rank, self._layer_of[call], num_rows)
