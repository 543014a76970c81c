"""CudaServer: the expert worker's end of all its lanes, in device memory.

One graph serves one batch (serve.py). Where heads are divided it serves one of heads, if there is one, and then one of
experts or slices. The host keeps a few graphs queued, so that the device never waits for
it; each begins when the bell is rung.

Slots change while graphs are queued and run. A graph that begins after `empty` refuses what asks for that slot; `fence`
tells when all graphs that began before have ended, so that its weights can be overwritten. The host writes the words of
slots through a stream of the driver, which waits for no other.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from everserve.backends.cuda.lanes import serve
from everserve.backends.cuda.lanes.batches import serve_experts, serve_heads
from everserve.backends.cuda.lanes.counters import CounterCopy
from everserve.backends.cuda.lanes.lane import POOL_AT, REQUEST_AT, CudaLaneShape
from everserve.backends.cuda.ops.experts import ExpertArena
from everserve.backends.cuda.ops.heads import HeadArena
from everserve.backends.cuda.ops.timeline import make_stop
from everserve.memory.device import Driver, Region
from everserve.tables.ids import Rank
from everserve.tables.slots import EMPTY

_QUEUED = 8  # batches: where heads are divided a graph serves two
_RING_EVERY_S = 50e-6
_RING = (1).to_bytes(4, "little")


class Served(NamedTuple):
    """What became of requests."""

    num_batches: int
    num_rows: int
    num_replayed_rows: int  # of these; another worker did not answer them
    num_refused: int  # requests, or dropped because their sender has left


class CudaServer:
    """The owner of the arena fills slots; `held_LS` says with which experts, -1 where there is none; slots that it does
    not mention are empty. `num_experts`: of the model, per layer.

    `heads`, `is_head_L`: where heads are divided; a layer here is a call then, and these are about heads. `pool`: the
    identity of their KV, which is written into each lane that is opened."""

    def __init__(
        self,
        driver: Driver,
        arena: ExpertArena,
        shape: CudaLaneShape,
        num_ranks: int,
        held_LS: torch.Tensor,
        bell: int,
        device: torch.device,
        num_experts: int,
        heads: HeadArena | None = None,
        is_head_L: torch.Tensor | None = None,
        pool: int = 0,
    ) -> None:
        assert arena.num_slots == shape.num_slots, "a lane has a count for each slot"
        assert heads is None or heads.num_slots == shape.num_slots
        self._heads = heads
        self._pool = pool
        self._driver = driver
        self._bell = bell
        self._arena = arena
        self._region = Region(driver, num_ranks, shape.lane_bytes())
        stop = make_stop(device)
        self._state = serve.ServeState.empty(
            shape, self._region.base, num_ranks, len(held_LS), shape.max_rows, stop, bell, num_experts, is_head_L
        )  # fmt: skip
        self._state.held_LS[:, : held_LS.shape[1]].copy_(held_LS)
        self._h_RF = torch.empty(shape.max_rows, arena.expert_size, dtype=torch.bfloat16, device=device)
        self._stream = torch.cuda.Stream(device)
        self._queued: deque[torch.cuda.Event] = deque()
        self._num_queued = _QUEUED if heads is None else _QUEUED // 2
        self._graphs = {may_be_large: self._capture(may_be_large) for may_be_large in (False, True)}
        self._rehearse()
        self._num_dropped = 0
        self._counters = CounterCopy(self._state.counters)

    def open(self, rank: Rank, lane_fd: int) -> None:
        """Serve this lane from now on. The descriptor stays the caller's."""
        self.drain()
        self._region.map(lane_fd, rank)
        self._tell_pool(rank)
        self._state.taken_A[rank] = 0
        self._set_healthy(rank, True)

    def close(self, rank: Rank) -> None:
        self.drain()
        self._num_dropped += self._has_asked(rank)
        self._state.healthy_A[rank] = 0
        torch.cuda.synchronize()
        self._region.unmap(rank)

    def set_healthy(self, rank: Rank, is_healthy: bool) -> None:
        """A worker that is not healthy is neither served nor waited for."""
        self.drain()
        self._set_healthy(rank, is_healthy)

    def empty(self, call_index: int, slot: int) -> None:
        """No graph that begins after this reads the slot's weights, until `hold`. Does not wait for the others."""
        self._write_word(self._state.held_LS, call_index, slot, EMPTY)

    def ring(self) -> None:
        """Let a graph that waits look for requests: whatever else waits for it can go on."""
        self._driver.write(self._bell, _RING)

    def fence(self) -> Callable[[], bool]:
        """Whether all graphs that are queued now have ended. They may have nothing to do but to wait for the bell, so
        who asks rings it."""
        last = self._queued[-1] if self._queued else None

        def is_over() -> bool:
            for _ in range(self._num_queued):
                if last is None or last.query():
                    return True
                self.ring()
                time.sleep(_RING_EVERY_S)
            return False

        return is_over

    def hold(self, call_index: int, slot: int, expert: int, place: int) -> None:
        """Its weights are there, in this place of the arena. The word that lets kernels use them is written last."""
        self._write_word(self._arena.place_LS, call_index, slot, place)
        self._write_word(self._state.held_LS, call_index, slot, expert)

    def hold_head(self, call: int, slot: int, head: int, piece: int, pool: int) -> None:
        """Its weights are there. `pool`: the identity of all KV from now on. Nothing may be queued."""
        assert self._heads is not None and not self._queued
        self._pool = pool
        for rank in range(self._state.num_ranks):
            if self._region.is_mapped(rank):
                self._tell_pool(Rank(rank))
        self._write_word(self._heads.piece_LS, call, slot, piece)
        self._write_word(self._state.held_LS, call, slot, head)

    def _tell_pool(self, rank: Rank) -> None:
        if self._heads is not None:
            self._driver.write(self._region.address(rank) + POOL_AT, self._pool.to_bytes(8, "little"))

    def top_up(self, may_be_large: bool) -> None:
        """Queue graphs up to the target number. Large requests are served sooner by graphs captured for them."""
        while self._queued and self._queued[0].query():
            self._queued.popleft()
        with torch.cuda.stream(self._stream):
            while len(self._queued) < self._num_queued:
                self._graphs[may_be_large].replay()
                event = torch.cuda.Event()
                event.record()
                self._queued.append(event)

    def drain(self) -> None:
        """Nothing of ours runs or is queued afterwards. Meanwhile graphs look once for requests: in the middle of a
        step that cannot go on, each of them would do that for as long as it may."""
        if not self._stream.query():
            self._set_max_spins(1)
            while not self._stream.query():
                self.ring()
                time.sleep(_RING_EVERY_S)
            self._set_max_spins(serve.MAX_SPINS)
        self._queued.clear()

    def end(self) -> None:
        """Stop serving, and unmap all lanes."""
        self.drain()
        self._region.close()

    def served(self) -> Served:
        """Since the beginning; up to two calls old."""
        batches, rows, refusals, replayed = self._counters.latest()[: serve.NUM_COUNTERS].tolist()
        return Served(batches, rows, replayed, refusals + self._num_dropped)

    def rows_by_expert(self) -> list[list[int]]:
        """[index of the MoE layer][expert]: rows since the beginning; up to two calls old."""
        rows: list[list[int]] = (
            self._counters.latest()[serve.NUM_COUNTERS :].reshape(self._state.rows_LN.shape).tolist()
        )
        return rows

    def _set_healthy(self, rank: Rank, is_healthy: bool) -> None:
        """The worker may have sent a request and rung while its lane was not polled: ring again for it."""
        self._state.healthy_A[rank] = int(is_healthy)
        torch.cuda.synchronize()
        self.ring()

    def _write_word(self, table_LS: torch.Tensor, call_index: int, slot: int, value: int) -> None:
        assert 0 <= call_index < table_LS.shape[0] and 0 <= slot < table_LS.shape[1]
        address = table_LS.data_ptr() + (call_index * table_LS.shape[1] + slot) * table_LS.element_size()
        self._driver.write(address, value.to_bytes(4, "little", signed=True))

    def _set_max_spins(self, number: int) -> None:
        self._driver.write(self._state.limits.data_ptr(), number.to_bytes(4, "little"))

    def _has_asked(self, rank: Rank) -> bool:
        """Whether it has sent a request that is not answered. Nothing of ours may be running."""
        request = self._driver.read(self._region.address(rank) + REQUEST_AT, 8)
        return int.from_bytes(request, "little") >> 16 > int(self._state.taken_A[rank].item())

    def _rehearse(self) -> None:
        """The first launch of a graph takes longer than any other."""
        with torch.cuda.stream(self._stream):
            for graph in self._graphs.values():
                graph.replay()
        self.drain()

    def _capture(self, may_be_large: bool) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(self._stream):
            self._serve(may_be_large)  # a warm-up: kernels are compiled and loaded
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._driver.wait_all_geq(self._stream.cuda_stream, [self._bell], 1)
            self._serve(may_be_large)
        return graph

    def _serve(self, may_be_large: bool) -> None:
        if self._heads is not None:
            serve_heads(self._state, self._heads, may_be_large)
        serve_experts(self._state, self._arena, self._h_RF, may_be_large)
