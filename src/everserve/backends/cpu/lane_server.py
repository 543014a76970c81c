"""The expert worker's end of all its lanes.

    poll -> choose a batch (seam/batching.py) -> compute, in place -> answer

A request that comes alone, where nothing is to be chosen, is computed without Python: `serve` is a poll that does that.

A request is refused, with a status that says why, if its sizes or indices are invalid. So whatever a dying peer leaves
behind costs that peer a request, and cannot crash this worker. A request is answered *moved* if a row names another
expert than its slot holds now: that is compared when the batch is gathered, and slots only change between batches.

Beside steps an attention worker may ask for KV: tokens of a stream that shall be in the pool
(memory/pieces/sources.py).

Several kinds of calls come through the same lanes: rows of experts, and heads. A batch is of one call, and so of one
kind.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from everserve.backends.cpu.lane import MAX_SLOTS, LaneLayout, LaneRegion, LaneShape, load
from everserve.backends.cpu.ops import NativeExpertSlots, NativeOps
from everserve.backends.cpu.row_checks import RowChecks
from everserve.memory.liveness import Cell
from everserve.memory.pieces.sources import Got, KvSources, Wanted
from everserve.memory.tables import Memory
from everserve.model.expert_half import ExpertHalf
from everserve.model.head_half import HeadHalf
from everserve.model.ops import HeadRequest, RowIndices, RowMemory
from everserve.native.structs import source
from everserve.seam.batching import BatchPolicy, Request
from everserve.seam.outcomes import Status
from everserve.tables.block_ranges import NO_BLOCKS, BlockRange
from everserve.tables.calls import Call, ShardKind
from everserve.tables.ids import MAX_RANKS, Rank

_c = source("lanes", "serve.c")
_MAX_REQUESTS = _c.constants["MAX_REQUESTS"]
_COUNT = 0xFFFFFFFF
_FETCH = _c.constants["FETCH"]
_STRETCH_NS = 50_000_000
_int64 = ctypes.c_int64
_INT32_BYTES = 4
_request = _c.packer("request")
_entry = _c.packer("batch_entry")


class _Incoming(ctypes.Structure):
    """struct incoming."""

    _fields_ = _c.fields("incoming")
    lane: int
    position: int


class _Server(ctypes.Structure):
    """struct server."""

    _fields_ = _c.fields(
        "server",
        {
            "layout": LaneLayout,
            "requests": ctypes.c_uint8 * (_request.size * (_MAX_REQUESTS + MAX_RANKS)),
            "batch": ctypes.c_uint8 * (_entry.size * _MAX_REQUESTS),
        },
    )
    timeout_ns: int
    is_holding: int
    alarm_seen: int
    control_seen: int
    num_refused: int


class _OwnExperts(ctypes.Structure):
    """struct own_experts."""

    _fields_ = _c.fields("own_experts")


class _Serving(ctypes.Structure):
    """struct serving."""

    _fields_ = _c.fields("serving")
    most_rows: int
    num_batches: int
    num_rows: int


class _Taken(ctypes.Structure):
    """struct taken, before its words."""

    _fields_ = _c.fields("taken")
    num_heads: int
    num_blocks: int
    num_tokens: int


def _wanted(address: int) -> Wanted:
    """What is behind it."""
    taken, at = _Taken.from_address(address), address + ctypes.sizeof(_Taken)
    chains = np.ctypeslib.as_array((ctypes.c_uint64 * taken.num_tokens).from_address(at))
    counts = (taken.num_heads, taken.num_heads, taken.num_blocks, taken.num_blocks)
    words = (ctypes.c_int32 * sum(counts)).from_address(at + chains.nbytes)
    _, pieces, sources, blocks = np.split(np.ctypeslib.as_array(words), np.cumsum(counts)[:-1])
    return Wanted(pieces, sources, blocks, chains)


class _Tables:
    """What C knows of each call: by number, addresses, or 0 for a call that is not served here."""

    def __init__(self, served: Mapping[int, "_Served"]) -> None:
        self.num_calls = max(served) + 1
        # By call and shard: how many rows were computed. C counts where it gathers them.
        self.rows_of = {call: (_int64 * one.num_shards)() for call, one in served.items()}
        self.held = self._table({call: ctypes.addressof(one.held) for call, one in served.items()})
        self.counts = self._table({call: ctypes.addressof(rows) for call, rows in self.rows_of.items()})
        self.num_slots = self._table({call: len(one.held) for call, one in served.items()})
        self.pieces = self._table(
            {call: ctypes.addressof(one.pieces) for call, one in served.items() if one.pieces is not None}
        )

    def _table(self, numbers: Mapping[int, int]) -> "ctypes.Array[ctypes.c_int64]":
        return (_int64 * self.num_calls)(*(numbers.get(call, 0) for call in range(self.num_calls)))


class _Served(NamedTuple):
    """One call."""

    layer: int
    num_shards: int
    held: "ctypes.Array[ctypes.c_int32]"
    pieces: "ctypes.Array[ctypes.c_int32] | None" = None  # of heads


def _calls_of(experts: ExpertHalf | None, heads: HeadHalf | None, calls: Sequence[Call] | None) -> dict[int, _Served]:
    """The calls by number. Without a list of calls each layer that crosses the seam is one, with the layer's number."""
    if calls is None:
        assert experts is not None
        cuts = experts.config.cuts
        return {cut.layer: _Served(cut.layer, cut.num_shards, experts.held[cut.layer]) for cut in cuts}
    served: dict[int, _Served] = {}
    for number, call in enumerate(calls):
        if call.kind is ShardKind.HEAD and heads is not None:
            pieces = heads.pieces[call.layer]
            served[number] = _Served(call.layer, call.num_shards, heads.held[call.layer], pieces)
        elif call.kind is not ShardKind.HEAD and experts is not None:
            served[number] = _Served(call.layer, call.num_shards, experts.held[call.layer])
    return served


class LaneServer:
    """`changed` is True after a poll that saw the alarm or the control word change; `attend` takes note.

    `calls`: all calls of a step, if they are more than one for each layer that crosses the seam.
    """

    def __init__(
        self,
        cell: Cell,
        alarm_address: int,
        shape: LaneShape,
        experts: ExpertHalf | None,
        spin_us: float = 0.0,
        heads: HeadHalf | None = None,
        calls: Sequence[Call] | None = None,
    ) -> None:
        self.changed = False
        self.checks: RowChecks | None = None  # are told of rows before they are answered
        self.fetches: list[Rank] = []  # attention workers that have asked for KV, in order of arrival
        self._cell = cell
        self._experts = experts
        self._heads = heads
        self._alarm = ctypes.c_uint32.from_address(alarm_address)
        self._region = LaneRegion(shape, MAX_RANKS)
        self._memory = RowMemory(self._region.base, self._region.num_rows, shape.hidden_size)
        self._lanes = (_Incoming * MAX_RANKS)()
        self._ranks: list[Rank] = []
        self._indices = [Memory(_INT32_BYTES * _MAX_REQUESTS * shape.max_rows) for _ in range(3)]
        self._index_addresses = [memory.address for memory in self._indices]
        self._served = _calls_of(experts, heads, calls)
        assert all(len(one.held) <= MAX_SLOTS for one in self._served.values())
        self._numbers = {call: number if calls is None else call for number, call in enumerate(self._served)}
        self._tables = _Tables(self._served)
        self.rows_of = self._tables.rows_of
        token_R, slot_R, y_R = self._index_addresses
        self._server = _Server(
            layout=shape.layout(),
            own=cell.address,
            alarm=alarm_address,
            base=self._region.base,
            lanes=ctypes.addressof(self._lanes),
            held=ctypes.addressof(self._tables.held),
            rows_of=ctypes.addressof(self._tables.counts),
            num_slots=ctypes.addressof(self._tables.num_slots),
            pieces=ctypes.addressof(self._tables.pieces),
            num_calls=self._tables.num_calls,
            token_R=token_R,
            slot_R=slot_R,
            y_R=y_R,
            spin_ns=round(spin_us * 1e3),
            **(self._head_fields(heads, shape) if heads is not None else {}),
        )
        self._address = ctypes.addressof(self._server)
        self._requests = memoryview(self._server.requests).cast("B")
        self._batch = memoryview(self._server.batch).cast("B")
        self._library = load().brief
        self._poll = load().blocking.es_lane_poll
        self._serve = load().blocking.es_lane_serve
        self._serving: _Serving | None = None
        self._own_experts = (_OwnExperts * self._tables.num_calls)()
        self._has_all_sizes = False
        self._gather = load().brief.es_lane_gather
        self._gather_heads = load().brief.es_lane_gather_heads
        self._answer = load().brief.es_lane_answer

    def _head_fields(self, heads: HeadHalf, shape: LaneShape) -> dict[str, int]:
        num_heads = heads.config.num_kv_heads
        self._pages = Memory(_INT32_BYTES * MAX_RANKS * shape.page_words)
        layout = shape.layout()
        self._taken = Memory(layout.first_box - layout.fetch_at)
        self._head_requests = (HeadRequest * _MAX_REQUESTS)()
        self._head_places = [Memory(_INT32_BYTES * _MAX_REQUESTS * num_heads) for _ in range(2)]
        head_slots, head_pieces = self._head_places
        return {
            "pool": heads.kv.id_address,
            "num_heads": num_heads,
            "answer_size": heads.answer_size,
            "num_positions": heads.max_model_len,
            "block_size": heads.block_size,
            "num_blocks": len(heads.kv_pool),
            "num_parking": heads.kv.num_parking,
            "pages": self._pages.address,
            "head_requests": ctypes.addressof(self._head_requests),
            "head_slots": head_slots.address,
            "head_pieces": head_pieces.address,
        }

    def open(self, rank: Rank, cell: Cell, lane_fd: int, blocks: BlockRange = NO_BLOCKS) -> None:
        """An attention worker is there, which may name these KV blocks. Takes over the descriptor; the cell must stay
        mapped until `drop`."""
        try:
            self.drop(rank)
            lane = self._region.map(lane_fd)
        finally:
            os.close(lane_fd)
        first, count = blocks
        self._lanes[rank] = _Incoming(lane=lane, cell=cell.address, position=-1, first_block=first, num_blocks=count)
        self._ranks.append(rank)

    def drop(self, rank: Rank) -> None:
        """It is gone: neither read its requests nor answer them."""
        if rank in self._ranks:
            self._ranks.remove(rank)
            self.fetches = [other for other in self.fetches if other != rank]
            self._region.unmap(self._lanes[rank].lane)
            self._lanes[rank] = _Incoming()

    def close(self) -> None:
        for rank in [*self._ranks]:
            self.drop(rank)
        self._region.close()

    @property
    def layers(self) -> list[int | None]:
        """By index of the call, its layer; None where heads are asked for, or nothing."""
        found = {self._numbers[call]: one.layer for call, one in self._served.items() if one.pieces is None}
        return [found.get(number) for number in range(1 + max(self._numbers.values()))]

    @property
    def positions(self) -> dict[Rank, int]:
        """Where attention workers were at the last poll: the call that each sends next, or -1."""
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
        return self._came(self._poll(self._address))

    def _came(self, found: int) -> list[Request]:
        self.changed = found > _COUNT
        came = [Request._make(_request.unpack_from(self._requests, _request.size * i)) for i in range(found & _COUNT)]
        self.fetches += [request.rank for request in came if request.layer == _FETCH]
        return [request for request in came if request.layer != _FETCH]

    def serve(self, timeout_s: float, most_rows: int, policy: BatchPolicy) -> list[Request]:
        """`poll`, but a request for experts that comes alone, with so many rows at most, is computed and answered, and
        the next one awaited. Not while requests are held back, nor for long: others want to use this thread."""
        if self._serving is None:
            self._serving = self._make_serving(policy)
        if self._serving is None:
            return self.poll(timeout_s)
        if not self._has_all_sizes:
            self._note_sizes()
        self._server.timeout_ns = int(timeout_s * 1e9)
        self._server.is_holding = False
        self._serving.most_rows = most_rows
        found = self._serve(self._address, ctypes.addressof(self._serving))
        assert found >= 0, "a slot that holds an expert has no weights"
        return self._came(found)

    @property
    def num_served(self) -> tuple[int, int]:
        """Batches and rows that `serve` has computed."""
        return (self._serving.num_batches, self._serving.num_rows) if self._serving is not None else (0, 0)

    def _make_serving(self, policy: BatchPolicy) -> _Serving | None:
        """None if the ops are not in C."""
        if self._experts is None or not isinstance(self._experts.ops, NativeOps):
            return None
        return _Serving(
            expert_rows=self._experts.ops.expert_rows_address,
            experts=ctypes.addressof(self._own_experts),
            num_region_rows=self._memory.num_rows,
            reach=policy.reach if policy.reach is not None else -1,
            stretch_ns=_STRETCH_NS,
        )

    def _note_sizes(self) -> None:
        """The sizes of a layer's experts are known when one of them was here."""
        self._has_all_sizes = True
        for call, (layer, _, _, pieces) in self._served.items():
            if pieces is None and self._experts is not None:
                slots = self._experts.slots(layer)
                assert isinstance(slots, NativeExpertSlots)
                self._has_all_sizes &= slots.inner_size > 0
                if slots.inner_size:
                    self._own_experts[call] = _OwnExperts(slots.table_ptr, slots.num_slots, slots.inner_size)

    def fetch_next(self, sources: KvSources) -> Got | None:
        """Get the KV that an attention worker has asked for first; None: nothing was asked for, or it was refused. A
        worker's requests of a step come after those for KV that it has sent before."""
        if not self.fetches:
            return None
        rank = self.fetches.pop(0)
        status = self._library.es_lane_take_fetch(self._address, rank, self._taken.address)
        got = Got(0, 0)
        if status == Status.COMPUTED:
            got = sources.fetch(_wanted(self._taken.address))
        self._library.es_lane_answer_fetch(self._address, rank, status, *got)
        return got if status == Status.COMPUTED else None

    def compute(self, batch: list[Request]) -> int:
        """All rows of these requests, which are of one call, in one call of the kernel; then answer. How many rows."""
        for i, request in enumerate(batch):
            _entry.pack_into(self._batch, _entry.size * i, request.rank, request.box)
        call = batch[0].layer
        layer, _, _, pieces = self._served[call]
        if pieces is not None:
            return self._compute_heads(batch, call, layer)
        num_rows: int = self._gather(self._address, len(batch), call)
        if num_rows:
            assert self._experts is not None
            token_R, slot_R, y_R = self._index_addresses
            rows = RowIndices(token_R, slot_R, y_R, num_rows)
            self._experts.rows_at(layer, self._memory, rows)
            if self.checks is not None and self.checks.needs_batches:
                self.checks.note(self._numbers[call], self._memory, rows)
            self._answer(self._address, len(batch))
        return num_rows

    def _compute_heads(self, batch: list[Request], call: int, layer: int) -> int:
        num_requests: int = self._gather_heads(self._address, len(batch), call)
        if not num_requests:
            return 0
        assert self._heads is not None
        self._heads.rows_at(layer, ctypes.addressof(self._head_requests), num_requests)
        self._answer(self._address, len(batch))
        return sum(request.num_rows * request.num_heads for request in self._head_requests[:num_requests])
