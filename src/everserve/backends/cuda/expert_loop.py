"""The expert worker on a GPU: keep the device supplied with graphs that wait for requests and serve them."""

import os
import time

from everserve.backends.cuda.lanes.server import CudaServer
from everserve.backends.cuda.waiting import load
from everserve.memory.liveness import Cell, PeerState, Warden
from everserve.memory.tables import Memory
from everserve.seam.outcomes import Outcome
from everserve.tables.ids import Rank
from everserve.tables.outputs import ExpertStats
from everserve.wire.event_log import EventLog
from everserve.wire.messages import StartWorker
from everserve.worker.control import ControlEnd, LeaveRequest
from everserve.worker.expert_service import ATTEND_EVERY_S, ExpertService
from everserve.worker.slot_changes import ChangeableSlots

_TURN_NS = 200_000  # how long to be away while graphs are queued
_FILL_TURN_NS = 50_000  # likewise, while a slot is filled: with the turn's own work, some 100 us
_NAP_NS = 50_000


class CudaExpertLoop(ExpertService):
    """Serves lanes in device memory."""

    def __init__(
        self,
        start: StartWorker,
        server: CudaServer,
        slots: ChangeableSlots,
        cell: Cell,
        warden: Warden,
        control: ControlEnd,
        leave: LeaveRequest,
        events: EventLog,
    ) -> None:
        super().__init__(start, slots, cell, warden, control, leave, events)
        self._server = server
        self._nothing = Memory(8)  # a word that never changes
        self._alarm_seen = self._control_seen = 0
        self._stats = ExpertStats()
        self._stats_at = 0.0

    def stats(self) -> ExpertStats:
        if time.monotonic() >= self._stats_at:  # asking the device takes a moment
            self._stats_at = time.monotonic() + 1.0
            served = self._server.served()
            self._stats = ExpertStats(
                num_batches=served.num_batches,
                num_rows=served.num_rows,
                num_replayed_rows=served.num_replayed_rows,
                num_stale=served.num_refused,
            )
        return self._stats

    def rows_by_expert(self) -> list[list[int]]:
        """[index of the MoE layer][expert]: rows since the start, as of the last time that was asked."""
        return self._server.rows_by_expert()

    @property
    def _num_pending(self) -> int:
        return int(self._is_needed)

    @property
    def _is_needed(self) -> bool:
        """Whether a healthy attention worker is in a step, and so may send requests."""
        return any(customer.is_healthy and customer.cell.position >= 0 for customer in self._customers.values())

    @property
    def _has_news(self) -> bool:
        return self._warden.alarm != self._alarm_seen or self._cell.control != self._control_seen

    def _note_news(self) -> None:
        self._alarm_seen, self._control_seen = self._warden.alarm, self._cell.control

    def _wait(self) -> None:
        self._cell.advance()
        wait_s = self._changes.wait_s(ATTEND_EVERY_S)
        if not wait_s:
            return
        turn_ns = _TURN_NS
        if self._changes.is_pending:  # a fill runs: its next chunk is queued at the next turn
            wait_s, turn_ns = _FILL_TURN_NS / 1e9, _FILL_TURN_NS
        if self._is_needed:
            outcome = load()(
                self._nothing.address, 1, self._cell.address, self._control_seen, self._warden.alarm_address,
                self._alarm_seen, turn_ns, _NAP_NS, 0,
            )  # fmt: skip
            assert outcome != Outcome.DONE
            self._asked_s = time.monotonic()
            return
        seen = self._cell.doorbell
        self._cell.idle = True  # before looking once more: a worker that begins a step now sees it, and rings
        if not self._is_needed and not self._has_news:
            self._cell.wait(seen, wait_s)
        self._cell.idle = False

    def _work(self) -> None:
        self._server.top_up(any(customer.cell.position > 0 for customer in self._customers.values()))

    def _open(self, rank: Rank, cell: Cell, lane_fd: int) -> None:
        self._server.open(rank, lane_fd)
        os.close(lane_fd)

    def _close(self, rank: Rank) -> None:
        self._server.close(rank)

    def _note_health(self, rank: Rank, state: PeerState) -> None:
        self._server.set_healthy(rank, state is PeerState.ALIVE)
