"""The expert worker's end of all its lanes.

    poll -> choose a batch (seam/batching.py) -> compute, in place -> answer

A request is refused, with a status that says why, if its sizes or indices are invalid. So whatever a dying peer leaves
behind costs that peer a request, and cannot crash this worker. A request is answered *moved* if a row names another
expert than its slot holds now: that is compared when the batch is gathered, and slots only change between batches.
"""

import ctypes
import os
from struct import Struct

from everserve.backends.cpu.lane import MAX_SLOTS, NUM_BOXES, LaneLayout, LaneRegion, LaneShape, load
from everserve.memory.liveness import Cell
from everserve.memory.tables import Memory
from everserve.model.expert_half import ExpertHalf
from everserve.model.ops import RowIndices, RowMemory
from everserve.seam.batching import Request
from everserve.tables.ids import MAX_RANKS, Rank

_MAX_REQUESTS = MAX_RANKS * NUM_BOXES
_COUNT = 0xFFFFFFFF
_int64 = ctypes.c_int64
_PerBox = _int64 * NUM_BOXES
_request = Struct("6q")
_entry = Struct("2q")


class _Incoming(ctypes.Structure):
    """struct incoming in csrc/serve.c."""

    _fields_ = [
        ("lane", _int64),
        ("cell", _int64),
        ("position", _int64),
        ("taken", _PerBox),
        ("num_tokens", _PerBox),
        ("num_rows", _PerBox),
    ]
    lane: int
    position: int


class _Server(ctypes.Structure):
    """struct server in csrc/serve.c."""

    _fields_ = [
        ("layout", LaneLayout),
        *((name, _int64) for name in ("own", "alarm", "base", "lanes", "held", "rows_of")),
        *((name, _int64) for name in ("num_layers", "num_slots", "token_R", "slot_R", "y_R")),
        *((name, _int64) for name in ("spin_ns", "timeout_ns", "is_holding", "alarm_seen", "control_seen")),
        ("num_refused", _int64),
        ("requests", _int64 * (6 * _MAX_REQUESTS)),
        ("batch", _int64 * (2 * _MAX_REQUESTS)),
    ]
    timeout_ns: int
    is_holding: int
    alarm_seen: int
    control_seen: int
    num_refused: int


class LaneServer:
    """`changed` is True after a poll that saw the alarm or the control word change; `attend` takes note."""

    def __init__(
        self, cell: Cell, alarm_address: int, shape: LaneShape, experts: ExpertHalf, spin_us: float = 0.0
    ) -> None:
        self.changed = False
        self._cell = cell
        self._experts = experts
        self._alarm = ctypes.c_uint32.from_address(alarm_address)
        self._region = LaneRegion(shape, MAX_RANKS)
        self._memory = RowMemory(self._region.base, self._region.num_rows, shape.hidden_size)
        self._lanes = (_Incoming * MAX_RANKS)()
        self._ranks: list[Rank] = []
        self._indices = [Memory(4 * _MAX_REQUESTS * shape.max_rows) for _ in range(3)]
        self._index_addresses = [memory.address for memory in self._indices]
        assert experts.num_slots <= MAX_SLOTS
        num_layers = max(experts.held) + 1
        self._held = (_int64 * num_layers)(
            *(ctypes.addressof(experts.held[i]) if i in experts.held else 0 for i in range(num_layers))
        )
        # By layer and expert: how many rows were computed. C counts where it gathers them.
        self.rows_of = {cut.layer: (_int64 * cut.num_shards)() for cut in experts.config.cuts}
        self._rows_at = (_int64 * num_layers)(
            *(ctypes.addressof(self.rows_of[i]) if i in self.rows_of else 0 for i in range(num_layers))
        )
        self._server = _Server(
            shape.layout(),
            cell.address,
            alarm_address,
            self._region.base,
            ctypes.addressof(self._lanes),
            ctypes.addressof(self._held),
            ctypes.addressof(self._rows_at),
            num_layers,
            experts.num_slots,
            *self._index_addresses,
            round(spin_us * 1e3),
        )
        self._address = ctypes.addressof(self._server)
        self._requests = memoryview(self._server.requests).cast("B")
        self._batch = memoryview(self._server.batch).cast("B")
        self._poll = load().blocking.es_lane_poll
        self._gather = load().brief.es_lane_gather
        self._answer = load().brief.es_lane_answer

    def open(self, rank: Rank, cell: Cell, lane_fd: int) -> None:
        """An attention worker is there. Takes over the descriptor; the cell must stay mapped until `drop`."""
        try:
            self.drop(rank)
            lane = self._region.map(lane_fd)
        finally:
            os.close(lane_fd)
        self._lanes[rank] = _Incoming(lane=lane, cell=cell.address, position=-1)
        self._ranks.append(rank)

    def drop(self, rank: Rank) -> None:
        """It is gone: neither read its requests nor answer them."""
        if rank in self._ranks:
            self._ranks.remove(rank)
            self._region.unmap(self._lanes[rank].lane)
            self._lanes[rank] = _Incoming()

    def close(self) -> None:
        for rank in [*self._ranks]:
            self.drop(rank)
        self._region.close()

    @property
    def positions(self) -> dict[Rank, int]:
        """Where attention workers were at the last poll: the layer that each sends next, or -1."""
        return {rank: self._lanes[rank].position for rank in self._ranks}

    @property
    def num_refused(self) -> int:
        return self._server.num_refused

    def attend(self) -> None:
        """Take note of the alarm and the control word, before what they stand for is looked at."""
        self._server.alarm_seen = self._alarm.value
        self._server.control_seen = self._cell.control

    def poll(self, timeout_s: float, is_holding: bool = False) -> list[Request]:
        """New requests; blocks until there are some, something changed, or time is up. `is_holding`: some that came
        before wait for company, so we are not idle."""
        self._server.timeout_ns = int(timeout_s * 1e9)
        self._server.is_holding = is_holding
        found = self._poll(self._address)
        self.changed = found > _COUNT
        return [Request._make(_request.unpack_from(self._requests, 48 * i)) for i in range(found & _COUNT)]

    def compute(self, batch: list[Request]) -> int:
        """All rows of these requests, which are of one layer, in one call of the kernel; then answer. How many rows."""
        for i, request in enumerate(batch):
            _entry.pack_into(self._batch, 16 * i, request.rank, request.box)
        layer = batch[0].layer
        num_rows: int = self._gather(self._address, len(batch), layer)
        if num_rows:
            token_R, slot_R, y_R = self._index_addresses
            self._experts.rows_at(layer, self._memory, RowIndices(token_R, slot_R, y_R, num_rows))
            self._answer(self._address, len(batch))
        return num_rows
