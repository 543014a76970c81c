"""CudaExperts: the experts are in other processes, which may die, hang or come back at any moment; rows go there and
back without the host.

Recorded, for each layer:   plan -> post | wait for all flags -> collect          (calls.py)

The host waits for the end of the whole step. If a peer is suspected meanwhile, it writes that lane's flag, so that the
device need not wait; `collect` then sees that the answer is not there, and the step stops. Then:

    the rows of that layer go to the next candidates, as replays      (the part before the |, recorded a second time)
    a slot holds another expert than our routes say                   likewise, without a suspicion
    an expert has no candidate                                        StepAbandoned, and the step is repeated later

A flag that was written without need does no harm: the step stops, and goes on waiting from there. What is done about a
peer is decided as on CPUs (seam/healing.py).
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from everserve.backends.cuda.lanes import send
from everserve.backends.cuda.lanes.calls import Calls, Cut
from everserve.backends.cuda.lanes.head_kv import CudaHeadKv
from everserve.backends.cuda.lanes.peers import CudaPeers
from everserve.backends.cuda.ops.ops import CudaOps
from everserve.backends.cuda.step_queue import LaunchedStep
from everserve.backends.cuda.waiting import load
from everserve.memory.device import Driver
from everserve.seam.healing import Healing, Reports
from everserve.seam.outcomes import Outcome, Status
from everserve.seam.trust import Suspicion
from everserve.tables.ids import Rank

_NAP_NS = 20_000
_RETRY_NS = 200_000  # how often flags are written while a step does not end
_GIVE_UP = 20  # looks, detect_ms apart, at a peer that lives and does not answer
LARGE_STEP = 256  # rows; a cell's position is 1 instead of 0 in larger ones


class CudaExperts:
    """`Experts` over lanes.

    cut(aside)   where the recording may be taken up again; `aside` is recorded for that case
    call_of      the call of each layer's experts; where heads are divided layers have two calls, and all of them are
                 seen through here
    layer_of     the layer of each call
    to_all       layers in which every row goes to all shards: a dense FFN in slices
    kv           where the KV of divided heads is
    """

    def __init__(
        self,
        peers: CudaPeers,
        ops: CudaOps,
        driver: Driver,
        cut: Cut,
        reports: Reports,
        *,
        detect_ms: float,
        lease_s: float | None = None,
        call_of: Mapping[int, int] | None = None,
        layer_of: Sequence[int] | None = None,
        to_all: Collection[int] = (),
        kv: CudaHeadKv | None = None,
    ) -> None:
        self._peers = peers
        self._state = peers.state
        self._ops = ops
        self._kv = kv
        self.calls = Calls(
            peers, cut, lambda flags: driver.wait_all_geq(torch.cuda.current_stream().cuda_stream, flags, 0)
        )
        self._timeout_ns = round(detect_ms * 1e6)
        layers = dict(zip(peers.calls, layer_of or peers.calls, strict=True))
        self._healing = Healing(peers, reports, _GIVE_UP, lease_s, layers)
        self._call_of = dict(call_of or {layer: i for i, layer in enumerate(peers.calls)})
        self._to_all = frozenset(to_all)
        self._must_release = False
        self._answers: dict[Rank, int] = {}  # the last one of each peer when it was looked at
        self._looked_ns = 0
        self._alarm_seen = self._control_seen = 0
        self._untold: list[Callable[[], None]] = []

    @property
    def num_replayed_rows(self) -> int:
        return self._healing.num_replayed_rows

    @property
    def num_moved_rows(self) -> int:
        return self._healing.num_moved_rows

    # -- recorded --------------------------------------------------------------------------------

    def __call__(
        self, layer: int, ids_TK: Tensor, weights_TK: Tensor, hidden_TD: Tensor, residual_TD: Tensor
    ) -> Tensor:
        call = self._call_of[layer]
        y_row_TK = self.calls(call, ids_TK, hidden_TD, to_all=layer in self._to_all)
        return send.collect(self._state, y_row_TK, weights_TK, residual_TD, call)

    # -- step by step ----------------------------------------------------------------------------

    def begin_step(self, num_rows: int) -> None:
        peers = self._peers
        self._check_kv(peers.calls[0])
        peers.upload()
        if self._kv is not None:
            self._kv.use()
        peers.is_in_step = True
        peers.cell.position = int(num_rows > LARGE_STEP)
        self._healing.begin_looks()
        self._answers.clear()
        self._looked_ns = time.monotonic_ns()
        self._wake_the_idle()

    def end_step(self) -> None:
        self._peers.is_in_step = False
        self._must_release = False
        self._peers.sweep()

    @property
    def may_go_ahead(self) -> bool:
        return self._peers.is_settled and (self._kv is None or self._kv.is_checked)

    def rehearse(self) -> None:
        """Run once, before there are peers, what is otherwise run only on failures or when idle."""
        self.rest()
        self._state.unplaced.zero_()
        for rank in map(Rank, self._peers.expert_ranks):
            self._peers.release(rank)
            self._peers.is_awaited(rank)
            self._peers.has_refused(rank)

    def rest(self) -> None:
        """No step runs for a while, or a step is given up: no expert worker should wait for us."""
        self._peers.cell.position = -1
        send.announce(self._state, -1)

    def is_running_after(self, step: LaunchedStep, wait_ns: int) -> bool:
        return self._wait(step.report.address, step.report.num_due, 0, wait_ns) == Outcome.TIMEOUT

    def see_through(self, step: LaunchedStep) -> None:
        """Wait for its report. A peer that does not answer is given up; a layer in which the step stopped is healed."""
        while True:
            timeout_ns = _RETRY_NS if self._must_release else self._timeout_ns
            outcome = self._wait(step.report.address, step.report.num_due, step.due_ns, timeout_ns)
            if outcome != Outcome.DONE:
                self._attend(outcome)
            elif not step.report.stop:
                if step.is_last:  # no lane, and so no pool, is another one while a step runs
                    self._check_pools()
                return
            else:
                with step.stopped() as moe_layer:
                    step.go_on(moe_layer, self._heal(moe_layer, step.report.unplaced, step.report.absent))

    def _check_kv(self, call: int) -> None:
        if self._kv is not None and self._kv.is_displaced:
            raise self._healing.kv_is_elsewhere(call)

    def _check_pools(self) -> None:
        """The step has ended: were its heads computed with the KV that there was before?"""
        if self._kv is not None and not self._kv.has_same_pools():
            raise self._healing.kv_is_lost(self._peers.calls[0])

    def _wait(self, address: int, num_due: int, due_ns: int, timeout_ns: int) -> int:
        """Until so many reports are there, or there is something to attend to, or so long."""
        peers = self._peers
        while self._untold:
            self._untold.pop(0)()
        outcome: int = load()(
            address, num_due, peers.cell.address, self._control_seen, peers.warden.alarm_address, self._alarm_seen,
            timeout_ns, _NAP_NS, due_ns,
        )  # fmt: skip
        return outcome

    def _attend(self, outcome: int) -> None:
        """Handle alarms and timeouts, so that the step can end: a peer that does not answer is given up."""
        peers, suspicions = self._peers, list[Suspicion]()
        if outcome == Outcome.ATTEND:
            self._alarm_seen, self._control_seen = self._healing.words()
            suspicions = self._healing.attend()
        else:
            if not self._must_release or time.monotonic_ns() - self._looked_ns >= self._timeout_ns:
                suspicions = self._look_at_the_silent()
            self._healing.read_control()
        self._wake_the_idle()
        given_up = peers.given_up
        self._must_release = bool(given_up)
        for rank in given_up:
            peers.release(rank)  # again and again: it may have been before the device began to wait
        self._healing.tell(suspicions)

    def _heal(self, moe_layer: int, unplaced: int, absent: int) -> bool:
        """The step stopped in this layer. Returns whether its rows must be sent again; StepAbandoned if an expert has
        no place."""
        peers, call = self._peers, self._peers.calls[moe_layer]
        self._state.unplaced.zero_()
        if unplaced:
            peers.reconsider()
            self.rest()
            raise self._healing.abandoned(call, [unplaced - 1])
        late = [Rank(rank) for rank in peers.expert_ranks if absent >> rank & 1]
        suspicions, moved = self._judge(late, call)
        lost = [rank for rank in late if peers.trusted(rank) is None]
        self._healing.num_moved_rows += sum(peers.take_back(moved))
        if self._kv is not None and self._kv.is_displaced:
            self.rest()
        self._check_kv(call)
        peers.upload()
        # Others are asked again too, but what they are sent they have been sent before: only these rows go elsewhere.
        rows = peers.take_back(lost) if lost else []
        self._healing.num_replayed_rows += sum(rows)
        self._untold.append(partial(self._healing.tell, suspicions))
        replays = zip(lost, rows, strict=True)
        self._untold += [partial(self._healing.tell_replay, rank, call, num) for rank, num in replays]
        return bool(lost or moved)

    def _judge(self, late: Sequence[Rank], call: int) -> tuple[list[Suspicion], list[Rank]]:
        """Peers whose answer is not there, or says no. And those whose slots hold something else than routes say."""
        peers, suspicions, moved = self._peers, list[Suspicion](), list[Rank]()
        for rank in late:
            peer = peers.trusted(rank)
            status = peers.has_refused(rank) if peer is not None else 0
            if status == Status.MOVED and self._healing.note_moved(rank, call, peers.moved_places(rank)):
                moved.append(rank)
            elif peer is not None and status:
                suspicions.append(self._healing.suspect(peer, status))
            elif peer is not None:
                peers.await_again(rank)
        return suspicions, moved

    def _look_at_the_silent(self) -> list[Suspicion]:
        """Nothing came for detect_ms. A peer with a live process may still be stuck; not if it has answered since the
        last look, in a long step.

        Only waiting for a peer renews the lease: it ends when the peer is given up. If it is our own device that does
        not come to an end, the lease does, and this worker is replaced."""
        self._looked_ns = time.monotonic_ns()
        peers = [peer for rank, _ in self._peers.incarnations if (peer := self._peers.trusted(rank)) is not None]
        awaited = [peer for peer in peers if self._peers.is_awaited(peer.rank)]
        for peer in peers:
            answer = self._peers.last_answer(peer.rank)
            is_same = self._answers.get(peer.rank, answer) == answer
            self._healing.look(peer, peer in awaited and is_same)
            self._answers[peer.rank] = answer
        if awaited:
            self._healing.renew_lease()
        return self._healing.suspect_the_deaf(peers)

    def _wake_the_idle(self) -> None:
        for rank, _ in self._peers.incarnations:
            peer = self._peers.trusted(rank)
            if peer is not None and peer.cell.idle:
                peer.cell.ring()
