"""The expert worker on CPUs: poll -> choose -> compute, in place -> answer."""

import time

from everserve.backends.cpu.lane import LaneShape
from everserve.backends.cpu.lane_server import LaneServer
from everserve.backends.cpu.row_checks import RowChecks
from everserve.memory.kv_pieces import KvPieces
from everserve.memory.liveness import Cell, PeerState, Warden
from everserve.memory.pieces.layout import owner_of
from everserve.memory.pieces.sources import KvSources
from everserve.model.expert_half import ExpertHalf
from everserve.model.head_half import HeadHalf
from everserve.seam.batching import ON_CPUS, BatchChoice, BatchPolicy, Request, choose
from everserve.tables.block_ranges import NO_BLOCKS, BlockRange, block_range_of
from everserve.tables.ids import Rank
from everserve.tables.outputs import ExpertStats
from everserve.wire.event_log import EventLog
from everserve.wire.messages import ComputeRow, StartWorker
from everserve.worker.control import ControlEnd, LeaveRequest
from everserve.worker.expert_service import ATTEND_EVERY_S, ExpertService
from everserve.worker.slot_changes import ChangeableSlots

_SHADOWED_AT_ONCE = 1 << 18  # bytes: a request that comes meanwhile waits for some 50 us


class ExpertLoop(ExpertService):
    """Serves lanes in host memory."""

    def __init__(
        self,
        start: StartWorker,
        experts: ExpertHalf,
        slots: ChangeableSlots,
        cell: Cell,
        warden: Warden,
        control: ControlEnd,
        leave: LeaveRequest,
        events: EventLog,
        *,
        policy: BatchPolicy = ON_CPUS,
        spin_us: float = 0.0,
        heads: HeadHalf | None = None,
        kv: KvPieces | None = None,
    ) -> None:
        self._kv = KvSources(kv) if kv is not None else None
        super().__init__(start, slots, cell, warden, control, leave, events, self._kv)
        self._policy = policy
        shape = LaneShape.for_engine(experts.config, start.settings.engine)
        calls = experts.config.calls if heads is not None else None
        self._server = LaneServer(cell, warden.alarm_address, shape, experts, spin_us, heads, calls)
        self._checks = self._server.checks = RowChecks(
            experts, self._server.layers, start.settings.compute.check_rows_s
        )
        # Homes share the pool in equal parts: there is one home on each device.
        self._blocks_per_home = len(heads.kv_pool) // (start.capacity.devices or 1) if heads is not None else 0
        self._pending: list[Request] = []  # in order of arrival
        self._num_batches = self._num_rows = self._num_replayed_rows = self._num_dropped = 0
        self._timeout_s = 0.0

    def stats(self) -> ExpertStats:
        num_batches, num_rows = self._server.num_served
        return ExpertStats(
            num_batches=self._num_batches + num_batches,
            num_rows=self._num_rows + num_rows,
            num_replayed_rows=self._num_replayed_rows,
            num_stale=self._num_dropped + self._server.num_refused,
            num_checked=self._checks.num_computed,
        )

    def rows_by_expert(self) -> list[list[int]]:
        return [[*rows] for rows in self._server.rows_of.values()]

    @property
    def _num_pending(self) -> int:
        return len(self._pending)

    @property
    def _has_news(self) -> bool:
        return self._server.changed

    def _note_news(self) -> None:
        self._server.attend()

    def _wait(self) -> None:
        timeout_s = self._changes.wait_s(self._timeout_s)
        if self._server.fetches or (self._kv is not None and not self._pending and self._kv.has_to_shadow):
            timeout_s = 0.0
        if (
            self._pending
            or self._kv is not None
            or self._changes.is_pending
            or self._leave_at is not None
            or self._checks.needs_batches
        ):
            self._pending += self._server.poll(timeout_s, is_holding=bool(self._pending))
        else:
            self._pending += self._server.serve(timeout_s, self._lease.quick_size, self._policy)

    def _work(self) -> None:
        if self._kv is not None and self._server.fetches:  # before what the same home asks for next
            self._server.fetch_next(self._kv)
            self._timeout_s = 0.0  # requests may have come meanwhile, and have not been looked at
            return
        if self._kv is not None and self._kv.has_to_shadow and (not self._pending or self._kv.is_behind):
            self._kv.shadow_some(_SHADOWED_AT_ONCE)
        choice = choose(self._pending, self._healthy_positions(), time.monotonic_ns(), self._policy)
        if choice.batch:
            self._compute(choice)
        # The poll looks for new requests before it blocks, so it may block as soon as none is left.
        self._timeout_s = min(choice.wait_s, ATTEND_EVERY_S) if self._pending else ATTEND_EVERY_S

    def _healthy_positions(self) -> dict[Rank, int]:
        return {rank: at for rank, at in self._server.positions.items() if self._customers[rank].is_healthy}

    def _compute(self, choice: BatchChoice) -> None:
        self._asked_s = time.monotonic() if self._leave_at is not None else 0.0
        self._lease.begin(sum([request.num_rows for request in choice.batch]), time.monotonic())
        self._num_rows += self._server.compute(choice.batch)
        self._lease.end(time.monotonic())
        if (sample := self._checks.next_sample()) is not None:
            self._control.send(sample)
        self._num_batches += 1
        self._num_replayed_rows += sum(request.num_rows for request in choice.batch if request.replay)
        self._pending = [request for request in self._pending if request not in choice.batch]

    def _compute_again(self, asked: ComputeRow) -> bytes:
        return self._checks.compute(asked)

    def _flip_bits(self) -> None:
        self._checks.is_flipping = True

    def _open(self, rank: Rank, cell: Cell, lane_fd: int) -> None:
        self._server.open(rank, cell, lane_fd, self._blocks_of(rank))

    def _blocks_of(self, home: Rank) -> BlockRange:
        """None for a worker that is not one of the homes which the pool was made for: its requests are refused."""
        is_home = home < (self._start.capacity.devices or 0)
        return block_range_of(home, self._blocks_per_home) if is_home else NO_BLOCKS

    def _regroup_kv(self, groups: list[list[list[tuple[int, int]]]]) -> None:
        if self._kv is not None:
            self._kv.regroup([[[owner_of(*head) for head in group] for group in home] for home in groups])

    def _close(self, rank: Rank) -> None:
        self._drop_pending(rank)
        self._server.drop(rank)

    def _note_health(self, rank: Rank, state: PeerState) -> None:
        if state is PeerState.DIED:
            self._drop_pending(rank)

    def _drop_pending(self, rank: Rank) -> None:
        """No worker waits for the answers to these requests any more."""
        kept = [request for request in self._pending if request.rank != rank]
        self._num_dropped += len(self._pending) - len(kept)
        self._pending = kept
