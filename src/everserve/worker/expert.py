"""The expert worker's loop: poll -> attend -> choose -> compute -> answer.

It keeps nothing between requests, so there is nothing to lose with it. It serves whoever has a lane to it; who that is,
the orchestrator says. Without an orchestrator it goes on serving those it knows.
"""

import logging
import os
import time
from dataclasses import dataclass

from everserve.datapath.lane import LaneShape
from everserve.datapath.serve import LaneServer, Request
from everserve.model.expert_half import ExpertHalf
from everserve.runtime.events import EventLog, StaleDropped
from everserve.runtime.liveness import Cell, PeerState, Warden, life_word
from everserve.runtime.messages import (
    AnyMessage,
    ExpertReport,
    Fenced,
    Leave,
    Leaving,
    PeerJoined,
    PeerLeft,
    Report,
    RoutesChanged,
    Shutdown,
    StartWorker,
)
from everserve.tables.ids import Epoch, Incarnation, Rank
from everserve.tables.outputs import ExpertStats
from everserve.worker.batching import BatchPolicy, Choice, choose
from everserve.worker.control import ControlEnd
from everserve.worker.lease import LEASE_S
from everserve.worker.leaving import LeaveRequest

log = logging.getLogger(__name__)

_ATTEND_EVERY_S = 0.25
_REPORT_EVERY_S = 1.0
_QUIET_S = 0.2  # a worker that leaves does so when it was not asked for anything for this long ...
_LEAVE_S = 5.0  # ... or in any case after this long


class _WasFenced(Exception):
    """The orchestrator has given our seat to somebody else."""


@dataclass
class _Peer:
    """One incarnation of an attention worker. A healthy one may be waited for."""

    incarnation: Incarnation
    cell: Cell
    is_healthy: bool = True


class ExpertLoop:
    """Expert slots between attention workers and an orchestrator."""

    def __init__(
        self,
        start: StartWorker,
        experts: ExpertHalf,
        cell: Cell,
        warden: Warden,
        control: ControlEnd,
        leave: LeaveRequest,
        events: EventLog,
        *,
        policy: BatchPolicy | None = None,
        spin_us: float = 0.0,
    ) -> None:
        self._start = start
        self._warden = warden
        self._control = control
        self._leave_request = leave
        self._events = events
        self._policy = policy or BatchPolicy()
        shape = LaneShape.of(experts.config, start.settings.max_num_batched_tokens)
        self._server = LaneServer(cell, warden.alarm_address, shape, experts, spin_us)
        self._peers: dict[Rank, _Peer] = {}
        self._pending: list[Request] = []  # in order of arrival
        self._num_batches = self._num_rows = self._num_replayed_rows = self._num_dropped = 0
        self._reported = ExpertStats()
        self._report_at = time.monotonic() + _REPORT_EVERY_S
        self._attend_at = 0.0
        self._stop_at: float | None = None
        self._leave_at: float | None = None  # set while leaving
        self._asked_s = 0.0  # when the last request came
        control.make_report = self._make_report

    def run(self) -> None:
        """Serve until fenced, or told to stop or to leave and nobody needs us any more."""
        timeout_s = 0.0
        try:
            while not self._is_over():
                self._warden.renew(LEASE_S)
                self._pending += self._server.poll(timeout_s, is_holding=bool(self._pending))
                if self._leave_request.was_asked and self._leave_at is None:
                    self._begin_to_leave()
                if self._server.changed or time.monotonic() >= self._attend_at:
                    self._attend()
                choice = choose(self._pending, self._healthy_positions(), time.monotonic_ns(), self._policy)
                if choice.batch:
                    self._compute(choice)
                # The poll looks for new requests before it blocks, so it may block as soon as none is left.
                timeout_s = min(choice.wait_s, _ATTEND_EVERY_S) if self._pending else _ATTEND_EVERY_S
        except _WasFenced as fenced:
            self._mourn(str(fenced))

    def stats(self) -> ExpertStats:
        """Counters since the start."""
        return ExpertStats(
            num_batches=self._num_batches,
            num_rows=self._num_rows,
            num_replayed_rows=self._num_replayed_rows,
            num_stale=self._num_dropped + self._server.num_refused,
        )

    def _is_over(self) -> bool:
        if self._control.is_cut:
            return True
        if self._leave_at is not None:
            now = time.monotonic()
            return now >= self._leave_at or (not self._pending and now - self._asked_s >= _QUIET_S)
        if self._stop_at is None:
            return False
        # Attention workers may finish what runs, and need us for it.
        has_customers = any(peer.is_healthy for peer in self._peers.values())
        return not has_customers or time.monotonic() >= self._stop_at

    def _begin_to_leave(self) -> None:
        """New routes lead to others. Who still asks has not heard of them, and is served."""
        log.info("leaving")
        self._asked_s = time.monotonic()
        self._leave_at = self._asked_s + _LEAVE_S
        self._control.send(Leaving())

    def _make_report(self) -> Report:
        return Report(
            is_ready=True,
            is_leaving=self._leave_at is not None,
            epoch=Epoch(0),
            peers=[(rank, peer.incarnation) for rank, peer in self._peers.items()],
            logs=[],
        )

    def _healthy_positions(self) -> dict[Rank, int]:
        return {rank: at for rank, at in self._server.positions.items() if self._peers[rank].is_healthy}

    def _compute(self, choice: Choice) -> None:
        self._asked_s = time.monotonic() if self._leave_at is not None else 0.0
        self._num_rows += self._server.compute(choice.batch)
        self._num_batches += 1
        self._num_replayed_rows += sum(request.num_rows for request in choice.batch if request.replay)
        self._pending = [request for request in self._pending if request not in choice.batch]

    # -- everything that is not a request --------------------------------------------------------

    def _attend(self) -> None:
        """The alarm rang or the control word changed; every now and then in any case."""
        self._attend_at = time.monotonic() + _ATTEND_EVERY_S
        self._server.attend()
        for rank in {Rank(key) for key, _ in self._warden.changes()} & self._peers.keys():
            state = self._warden.state(rank)
            self._peers[rank].is_healthy = state is PeerState.ALIVE
            if state is PeerState.DIED:
                self._drop_pending(rank)
        self._control.read(self._handle)
        self._control.flush()
        self._report()

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, PeerJoined):
            self._join(message)
        elif isinstance(message, PeerLeft):
            self._leave(message.rank, message.incarnation)
        elif isinstance(message, Fenced):
            raise _WasFenced(message.reason)
        elif isinstance(message, Leave):
            self._leave_request.ask()
        elif isinstance(message, Shutdown):
            self._stop_at = time.monotonic() + message.grace_s
        elif not isinstance(message, RoutesChanged):  # routes are for those who send
            log.warning("dropped a %s: not for an expert worker", type(message).__name__)

    def _join(self, message: PeerJoined) -> None:
        cell_fd, lane_fd = self._control.take_fd(), self._control.take_fd()
        cell = Cell(cell_fd)
        os.close(cell_fd)
        if message.rank in self._peers:
            self._leave(message.rank, self._peers[message.rank].incarnation)
        self._server.open(message.rank, cell, lane_fd)
        self._peers[message.rank] = _Peer(message.incarnation, cell)
        self._warden.watch(message.rank, cell, life_word(self._start.rank, self._start.incarnation))

    def _leave(self, rank: Rank, incarnation: Incarnation) -> None:
        peer = self._peers.get(rank)
        if peer is None or peer.incarnation != incarnation:
            return
        del self._peers[rank]
        self._drop_pending(rank)
        self._server.drop(rank)
        self._warden.unwatch(rank)
        peer.cell.close()

    def _drop_pending(self, rank: Rank) -> None:
        """Nobody waits for these any more."""
        kept = [request for request in self._pending if request.rank != rank]
        self._num_dropped += len(self._pending) - len(kept)
        self._pending = kept

    def _report(self) -> None:
        now, stats = time.monotonic(), self.stats()
        if now >= self._report_at and stats != self._reported:
            self._control.send(ExpertReport(stats=stats))
            self._reported = stats
            self._report_at = now + _REPORT_EVERY_S

    def _mourn(self, reason: str) -> None:
        """We were declared gone while we could not hear it. Our lanes are not read any more; leave them alone."""
        log.warning("declared gone (%s): exiting with %d requests not computed", reason, len(self._pending))
        self._num_dropped += len(self._pending)
        rank, incarnation = self._start.rank, self._start.incarnation
        count, what = len(self._pending), "requests to an expert worker that was declared gone"
        self._events.append(
            StaleDropped(process=self._events.process, rank=rank, incarnation=incarnation, count=count, what=what)
        )
